# SPDX-License-Identifier: Apache-2.0
"""`ejkernel doctor`: versions, devices, settings, caches and implementations, for a bug report."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import jax

from ejkernel import settings
from ejkernel.cli import report
from ejkernel.cli.explain import implementations_on, rows_as_data
from ejkernel.cli.folder import items
from ejkernel.ops.config._files import driver_of
from ejkernel.ops.config.persistent import PersistentCache, fault_of
from ejkernel.ops.errors import EjkernelError
from ejkernel.ops.utils.error_text import error_text, printable
from ejkernel.ops.utils.fingerprint import device_fingerprint
from ejkernel.ops.utils.formatting import counted

_RELEVANT = ("jax", "numpy", "absl-py", "ray", "fsspec", "libtpu", "flax", "equinox", "triton")
_VARIABLES = ("EJKERNEL_", "JAX_", "XLA_", "CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS", "TF_CPP_MIN_LOG_LEVEL")
_CREDENTIALS = re.compile(r"//[^/@\s]*@")  # of a URL


def run_doctor(environment: Mapping[str, str], *, as_json: bool) -> int:
    """Run `ejkernel doctor`; return 1 if a setting or a cache cannot be used.

    Args:
        environment: The variables, as the user set them.
        as_json: Whether to print JSON.
    """
    found: dict[str, Any] = {
        "versions": dict(_versions()),
        "devices": _devices(),
        "settings": _settings(environment),
        "caches": _caches(),
        "implementations": rows_as_data(implementations_on(device_fingerprint())),
    }
    problems = [row["problem"] for part in ("settings", "caches") for row in found[part] if row["problem"]]
    if as_json:
        report.echo_json(found | {"problems": problems})
    else:
        click.echo(f"{counted(len(problems), 'problem')}" + "".join(f"\n  {printable(each)}" for each in problems))
        click.echo(f"\n{_as_text(found)}")
    return 1 if problems else 0


def _versions() -> Iterator[tuple[str, str]]:
    yield "ejkernel-ops", importlib.metadata.version("ejkernel-ops")
    yield "Python", platform.python_version()
    yield "system", platform.platform()
    for name in sorted({distribution.name or "" for distribution in importlib.metadata.distributions()}):
        if name in _RELEVANT or name.startswith(("jaxlib", "jax-", "nvidia-cudnn", "nvidia-cuda-runtime")):
            yield name, importlib.metadata.version(name)


def _devices() -> list[dict[str, Any]]:
    return [
        {"device": device_fingerprint(device), "id": device.id, "driver": driver_of(device_fingerprint(device))}
        for device in jax.local_devices()
    ]


def _settings(environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the relevant variables, and the reason for each that ejkernel cannot use."""
    found = [
        {"variable": name, "value": _CREDENTIALS.sub("//...@", value), "problem": None}
        for name, value in sorted(environment.items())
        if name.startswith(_VARIABLES)
    ]
    return found + list(_faults(settings.Settings(environment)))


def _faults(current: settings.Settings) -> Iterator[dict[str, Any]]:
    """Yield a row for each setting with a bad value."""
    names = [name for name, kind in vars(settings.Settings).items() if isinstance(kind, functools.cached_property)]
    for name in names:
        try:
            getattr(current, name)
        except (EjkernelError, RuntimeError) as error:
            variable = {"record": "OPS_RECORD", "stamp": "OPS_STAMP"}.get(name, name.upper())
            yield {"variable": f"EJKERNEL_{variable}", "value": "", "problem": error_text(error)}


def _caches() -> list[dict[str, Any]]:
    """Return the folders and URLs of configurations, the folder for writing first."""
    try:
        current = settings.current()
        folder, layers = current.cache_dir, current.cache_layers
    except (EjkernelError, RuntimeError):  # already among the settings
        return []
    rows = [_folder(str(folder), written=True)]
    shared = [_CREDENTIALS.sub("//...@", place) for place in layers if "://" in place]
    rows += [{"place": place, "state": "shared", "problem": None} for place in shared]
    return rows + [_folder(place, written=False) for place in layers if "://" not in place]


def _folder(place: str, *, written: bool) -> dict[str, Any]:
    variable = "EJKERNEL_CACHE_LAYERS" if not written else settings.current().cache_variable
    fault = fault_of(Path(place), variable)
    if not os.path.isdir(place):
        # The default folder is missing until the first save, but a named one may be a copy with a misspelt name.
        creates = "; the first save creates it" if written else ""
        state, problem = f"does not exist{creates}", f"{fault}{creates}" if variable else None
    elif fault:
        state, problem = "no configurations", fault
    else:
        found = list(items(Path(place)))
        unusable = sum(bool(item.problem) for item in found)
        state = f"{counted(len(found), 'file')}, {unusable} unusable"
        problem = f"{place} has {counted(unusable, 'unusable file')}: see `ejkernel cache verify`" if unusable else None
    # A missing folder is not created.
    existing = next(each for each in (Path(place), *Path(place).absolute().parents) if os.path.lexists(each))
    reason = PersistentCache(existing, layers=()).why_not_writable() if written else None
    if reason is not None:
        state, problem = f"{state}, not writable", f"{place} cannot be written: {reason}; set EJKERNEL_CACHE_DIR"
    return {"place": place, "state": state, "problem": problem}


def _as_text(found: dict[str, Any]) -> str:
    runs: dict[str, list[str]] = {}
    for row in found["implementations"]:
        runs.setdefault(row["operation"], []).extend([row["implementation"]] if row["runs_here"] else [])
    variables = [_cells(row)[:2] for row in found["settings"]]
    parts = [
        report.table(("versions", ""), list(found["versions"].items())),
        report.table(("device", "id", "driver"), [_cells(row) for row in found["devices"]]),
        report.table(("variable", "value"), variables) if variables else "no variables set",
        report.table(("configurations", "state"), [_cells(row)[:2] for row in found["caches"]]),
        report.table(("operation", "runs here"), [(name, ", ".join(those) or "-") for name, those in runs.items()]),
        "`ejkernel list` says why other implementations do not run here.",
    ]
    return "\n\n".join(parts)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple("-" if value is None else printable(str(value)) for value in row.values())
