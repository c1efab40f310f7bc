# SPDX-License-Identifier: Apache-2.0
"""Settings from environment variables; no other module reads them. A bad value is an error that names the variable."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

CACHE_FOLDER = "configs"  # the last part of the default cache folder, which has other files beside it
_BOOLS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_STALE = ("use", "retune", "refuse")
_MAY_DIFFER = ("jax", "jaxlib", "driver", "space")
_DETERMINISTIC = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")
_PROTOCOL = re.compile(r"[a-z][a-z0-9+.-]*")
_READ = (  # all variables that settings depend on; `~` expands to one of the home folders
    "EJKERNEL_AUTOTUNE",
    "EJKERNEL_BATCHES",
    "EJKERNEL_CACHE_DIR",
    "EJKERNEL_CACHE_LAYERS",
    "EJKERNEL_CACHE_PROTOCOLS",
    "EJKERNEL_NOTE_MISSES",
    "EJKERNEL_ON_MISS",
    "EJKERNEL_OPS_RECORD",
    "EJKERNEL_OPS_STAMP",
    "EJKERNEL_STALE",
    "HOME",
    "USERPROFILE",
    "XDG_CACHE_HOME",
)
_WITHOUT_TPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # any: the compiler's topology is given with each program
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
_PREFIX = "EJKERNEL_"
_OURS = tuple(name for name in _READ if name.startswith(_PREFIX))


@dataclasses.dataclass(eq=False, repr=False)
class Settings:
    """Process-wide defaults; constructor arguments take precedence.

    Each variable is read on first use, so that a bad value only affects code that needs it. An unset or empty variable
    means its default.

    Attributes:
        env: The environment.
    """

    env: Mapping[str, str]

    @functools.cached_property
    def cache_dir(self) -> Path:
        """The folder to which the persistent cache writes (`EJKERNEL_CACHE_DIR`)."""
        given = self.env.get("EJKERNEL_CACHE_DIR", "").strip()
        if "://" in given:
            raise _error(f"EJKERNEL_CACHE_DIR must be a folder, got {given!r}; URLs are for EJKERNEL_CACHE_LAYERS.")
        if given:
            try:
                return Path(given).expanduser()
            except RuntimeError as error:
                raise _error(
                    f"EJKERNEL_CACHE_DIR: cannot find the home folder in {given!r}; use an absolute path."
                ) from error
        base = self.env.get("XDG_CACHE_HOME", "").strip() or "~/.cache"
        return Path(base).expanduser() / "ejkernel" / CACHE_FOLDER

    @property
    def cache_variable(self) -> str:
        """The variable that names `cache_dir`; empty for the default folder."""
        return "EJKERNEL_CACHE_DIR" if self.env.get("EJKERNEL_CACHE_DIR", "").strip() else ""

    @functools.cached_property
    def batches(self) -> Path | None:
        """The file of recorded batches with which tuning measures `paged_attention` (`EJKERNEL_BATCHES`)."""
        given = self.env.get("EJKERNEL_BATCHES", "").strip()
        if "://" in given:
            raise _error(f"EJKERNEL_BATCHES must be a file, got {given!r}; download it first.")
        return Path(given).expanduser() if given else None

    @functools.cached_property
    def cache_layers(self) -> tuple[str, ...]:
        """Folders and URLs to read after `cache_dir` (`EJKERNEL_CACHE_LAYERS`, separated by commas)."""
        return _items(self.env, "EJKERNEL_CACHE_LAYERS")

    @functools.cached_property
    def cache_protocols(self) -> tuple[str, ...]:
        """Additional protocols for URLs of shared caches (`EJKERNEL_CACHE_PROTOCOLS`)."""
        names = tuple(name.lower() for name in _items(self.env, "EJKERNEL_CACHE_PROTOCOLS"))
        bad = [name for name in names if not _PROTOCOL.fullmatch(name)]
        if bad:
            raise _error(f"EJKERNEL_CACHE_PROTOCOLS must list protocols, such as hdfs; got {bad[0]!r}.")
        return names

    @functools.cached_property
    def on_miss(self) -> str:
        """What the default executor does on a miss: `heuristic`, `tune` or `error` (`EJKERNEL_ON_MISS`).

        `EJKERNEL_AUTOTUNE=1` is the same as `tune`.
        """
        asked = _choice(self.env, "EJKERNEL_ON_MISS", ("heuristic", "tune", "error"), "heuristic")
        tune = _BOOLS[_choice(self.env, "EJKERNEL_AUTOTUNE", _BOOLS, "0")]
        if tune and asked != "tune" and self.env.get("EJKERNEL_ON_MISS", "").strip():
            raise _error(f"EJKERNEL_ON_MISS={asked} and EJKERNEL_AUTOTUNE=1 contradict each other; unset one of them.")
        return "tune" if tune else asked

    @functools.cached_property
    def note_misses(self) -> bool:
        """Whether the default executor writes misses to the cache folder (`EJKERNEL_NOTE_MISSES`)."""
        return _BOOLS[_choice(self.env, "EJKERNEL_NOTE_MISSES", _BOOLS, "0")]

    @functools.cached_property
    def record(self) -> bool:
        """Whether every lowered call is recorded (`EJKERNEL_OPS_RECORD`)."""
        return _BOOLS[_choice(self.env, "EJKERNEL_OPS_RECORD", _BOOLS, "0")]

    @functools.cached_property
    def stale(self) -> dict[str, Any]:
        """Actions for stale entries (`use`, `retune` or `refuse`), by the field that differs.

        `EJKERNEL_STALE` is one action for all fields, such as `retune`, or a list such as `jax=retune,driver=refuse`.
        """
        raw = self.env.get("EJKERNEL_STALE", "").strip().lower()
        if raw in _STALE:  # for all fields
            return dict.fromkeys(_MAY_DIFFER, raw)
        actions: dict[str, str] = {}
        for item in _items(self.env, "EJKERNEL_STALE"):
            name, _, action = (part.strip() for part in item.lower().partition("="))
            if name not in _MAY_DIFFER or action not in _STALE:
                choices = f"one of {', '.join(_STALE)}, or NAME=ACTION of {', '.join(_MAY_DIFFER)}"
                raise _error(f"EJKERNEL_STALE must be {choices}; got {raw!r}.")
            if name in actions:
                raise _error(f"EJKERNEL_STALE must list {name} only once; got {raw!r}.")
            actions[name] = action
        return actions

    @functools.cached_property
    def stamp(self) -> str:
        """Content of a call's label in the program's text: `hash`, `json` or `none` (`EJKERNEL_OPS_STAMP`)."""
        return _choice(self.env, "EJKERNEL_OPS_STAMP", ("hash", "json", "none"), "hash")

    def check(self) -> None:
        """Raise if a setting other than folders and URLs is bad; commands call this before they start."""
        for name in ("on_miss", "note_misses", "record", "stale", "stamp"):
            getattr(self, name)


def environment() -> dict[str, str]:
    """Return the variables of this process."""
    return dict(os.environ)


def current() -> Settings:
    """Return the settings of the environment as it is now."""
    return _of(tuple((name, os.environ[name]) for name in _READ if name in os.environ))


@functools.lru_cache(maxsize=16)
def _of(variables: tuple[tuple[str, str], ...]) -> Settings:
    unknown = sorted({name for name in os.environ if name.upper().startswith(_PREFIX)}.difference(_OURS, _reported))
    if unknown:
        _warn_of(unknown)
    return Settings(dict(variables))


_reported: set[str] = set()  # variables of which this process does not warn, or not again


def suppress_unknown_variable_warnings() -> None:
    """Do not warn about unknown variables in this process, because its parent already has."""
    _reported.update(os.environ)


def _warn_of(unknown: list[str]) -> None:
    _reported.update(unknown)
    from ejkernel.ops.errors import SettingsWarning  # imports JAX, so only if needed
    from ejkernel.ops.utils.messages.names import nearest
    from ejkernel.ops.utils.messages.warn import warn_of_environment

    endings = {name.removeprefix(_PREFIX): name for name in _OURS}  # the common prefix would make all names similar
    for name in unknown:
        close = nearest(name[len(_PREFIX) :], endings)
        advice = f"did you mean {endings[close]}?" if close else f"the variables are {', '.join(_OURS)}."
        text = f"the environment variable {name} has no effect, because ejkernel does not know it; {advice}"
        warn_of_environment(text, SettingsWarning)


def deterministic_ops(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether `XLA_FLAGS` restrict XLA to operations with bitwise reproducible results."""
    found = False
    for flag in environ.get("XLA_FLAGS", "").split():
        name, _, value = flag.lstrip("-").partition("=")
        if name in _DETERMINISTIC:
            found = found or value.lower() in ("", "1", "true")
    return found


_LOG_LEVEL_OF_JAX = "1"  # JAX sets this level at import, and child processes inherit it


def share_device(environ: Mapping[str, str]) -> None:
    """Prepare a process that runs candidates on a shared device; call it before JAX initialises the device.

    JAX allocates GPU memory on demand instead of reserving most of it. XLA logs errors but no warnings, because a
    candidate that does not fit in memory would print pages of them. The user's own settings stay.

    Args:
        environ: Variables to set.
    """
    os.environ.update(environ)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", _LOG_LEVEL_OF_JAX) == _LOG_LEVEL_OF_JAX:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"


def only_gpu(number: int) -> dict[str, str]:
    """Return environment variables that restrict a child process to one GPU, by its number in this process."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if not visible:
        return {"CUDA_VISIBLE_DEVICES": str(number)}
    return {"CUDA_VISIBLE_DEVICES": visible[number] if number < len(visible) else ""}


def visible_gpus() -> list[str]:
    """Return the names of this process's GPUs, as in `CUDA_VISIBLE_DEVICES`, without loading a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    found = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return [str(number) for number in range(max(found, 1))]  # other systems than Linux have no such files: assume one


def gpu_named(name: str) -> dict[str, str]:
    """Return environment variables that restrict a child process to the GPU with this name."""
    return {"CUDA_VISIBLE_DEVICES": name}


def compile_without_gpu() -> None:
    """Let JAX's CUDA plugin load on a machine without a GPU, so that it can compile for one."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def compile_without_tpu() -> None:
    """Let Google's compiler for TPUs load on a machine without a TPU, in several processes; call it before that.

    Without these variables it asks a server for the kind of this machine, and locks a file.
    """
    for name, value in _WITHOUT_TPU.items():
        os.environ.setdefault(name, value)


def simulate_tpu(folder: Path) -> None:
    """Have Google's compiler for TPUs write estimates of each kernel to a folder; call it before the compiler loads."""
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_static_llo_profile_to={folder}"


def log_register_spills() -> None:
    """Make the GPU compilers log register spills; call it before their first use in the process."""
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"


def _error(text: str) -> Exception:
    from ejkernel.ops.errors import ConfigError  # imports JAX, so only if needed

    return ConfigError(text)


def _items(env: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Return the distinct items of a variable that lists them with commas."""
    raw = env.get(name, "").strip()
    found = tuple(map(str.strip, raw.split(","))) if raw else ()
    if not all(found):  # for example `$OURS,$THEIRS` if one of them is not set
        raise _error(f"{name} must not have empty items; got {raw!r}. Remove the extra comma.")
    twice = next((item for item in found if found.count(item) > 1), None)
    if twice is not None:
        raise _error(f"{name} must list each item once, but lists {twice!r} twice; got {raw!r}.")
    return found


def _choice(env: Mapping[str, str], name: str, allowed: Collection[str], default: str) -> str:
    raw = env.get(name, "").strip().lower() or default
    if raw not in allowed:
        from ejkernel.ops.utils.messages.names import did_you_mean  # imports JAX, as `_error` does

        raise _error(f"{name} must be one of {', '.join(allowed)}; got {raw!r}{did_you_mean(raw, allowed)}")
    return raw
