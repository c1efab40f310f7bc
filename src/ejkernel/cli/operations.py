# SPDX-License-Identifier: Apache-2.0
"""`ejkernel list`: operations, their implementations, and why one cannot run here."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Final

import click

from ejkernel.cli import report
from ejkernel.cli.programs import import_users, look_here, module_named
from ejkernel.ops.core.kernel import Kernel, living_kernels, overrides, run_forms
from ejkernel.ops.utils.fingerprint import device_fingerprint

_OPERATIONS: Final = ("flash_attention", "rms_norm")  # modules of `ejkernel.modules` that say their `implementations`


def run_list(imports: Sequence[str], *, as_json: bool) -> None:
    """Run `ejkernel list`."""
    look_here()
    rows = [
        (name, implementation, reason)
        for name in _OPERATIONS
        for implementation, reason in importlib.import_module(f"ejkernel.modules.{name}").implementations().items()
    ]
    for module in map(module_named, imports):
        import_users(module)
    for op, kernel in _kernels() if imports else []:
        rows += [(op, form, "") for form in ["run"] * overrides(kernel, "run") + run_forms(kernel)]
    device = device_fingerprint()
    if as_json:
        found = [
            {"operation": name, "implementation": implementation, "runs_here": not reason, "reason": reason or None}
            for name, implementation, reason in rows
        ]
        report.echo_json({"device": device, "implementations": found})
        return
    click.echo(f"On {device}:", err=True)
    cells = [(name, implementation, "no" if reason else "yes", reason) for name, implementation, reason in rows]
    click.echo(report.table(("operation", "implementation", "runs here", "why not"), cells))


def _kernels() -> list[tuple[str, Kernel[Any, Any]]]:
    """Return the kernels that are not of this package, by versioned name; of each name the latest."""
    return [
        (op, kernels[0])
        for op, kernels in living_kernels().items()
        if not f"{kernels[0].__module__}.".startswith("ejkernel.")
    ]
