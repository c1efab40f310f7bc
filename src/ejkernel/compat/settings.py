# SPDX-License-Identifier: Apache-2.0
"""JAX's settings for the whole process."""

from __future__ import annotations

import logging
from typing import Any

import jax

# The type stubs of `jax.config` lack its options.
config: Any = jax.config


def avoids_jit() -> bool:
    """Return whether JAX runs op by op: under `jax.disable_jit`, or to find the source of NaN or infinity."""
    return bool(config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs)


def have_cpu_devices(count: int) -> None:
    """Give this process `count` CPU devices and no others; call it before JAX initialises a backend."""
    config.update("jax_platforms", "cpu")
    config.update("jax_num_cpu_devices", count)


def leave_devices_alone() -> None:
    """Restrict JAX to the CPU in this process; call it before JAX initialises a backend."""
    config.update("jax_platforms", "cpu")


def forget_compilations() -> None:
    """Disable JAX's persistent compilation cache in this process."""
    config.update("jax_enable_compilation_cache", False)


def process_settings() -> dict[str, Any]:
    """Return the process-wide values of all options of `jax.config`, without the overrides of this thread."""
    holders = config._value_holders
    return {name: _of_process(holder) for name, holder in holders.items()}


def put_back(settings: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Restore the values from `process_settings`; return the changed options, each with the restored and old value."""
    now = process_settings()
    changed = {name: (value, now[name]) for name, value in settings.items() if name in now and now[name] != value}
    for name, (value, _) in changed.items():
        config.update(name, value)
    return changed


def _of_process(holder: Any) -> Any:
    # Flags without a context manager have one value for all threads.
    return holder.get_global() if hasattr(holder, "get_global") else holder.value


def silence_failed_callbacks() -> None:
    """Have JAX log nothing of callbacks that fail from now on: at its end this process ends them itself."""
    logging.getLogger("jax._src.callback").disabled = True
