# SPDX-License-Identifier: Apache-2.0
"""Kernels under `vmap` and `pmap`, with one configuration for the whole batch or all devices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from ejkernel.ops.core.kernel import Kernel, unbound
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.execution.executor import Executor, default_executor
from ejkernel.ops.utils.messages.names import check_argument


def vmap_with_config(
    kernel: Kernel[Cfg, Out],
    in_axes: Any = 0,
    out_axes: Any = 0,
    *,
    cfg: Cfg | None = None,
    executor: Executor[Any, Any] | None = None,
    **vmap_options: Any,
) -> Callable[..., Any]:
    """Return `kernel` batched by `jax.vmap`; its configuration is chosen once, for the whole batch.

    Args:
        kernel: The kernel to run.
        in_axes: Batch axes of the positional arguments, as in `jax.vmap`. Keyword arguments are not batched.
        out_axes: Batch axes of the results.
        cfg: The configuration; `None` lets the executor choose one.
        executor: The executor that runs the kernel; the default executor if omitted.
        **vmap_options: `axis_name`, `axis_size`, `spmd_axis_name`.
    """
    transform = functools.partial(jax.vmap, in_axes=in_axes, out_axes=out_axes, **vmap_options)
    return _mapped(kernel, transform, cfg, executor)


def pmap_with_config(
    kernel: Kernel[Cfg, Out],
    axis_name: str | None = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    *,
    cfg: Cfg | None = None,
    executor: Executor[Any, Any] | None = None,
    **pmap_options: Any,
) -> Callable[..., Any]:
    """Return `kernel` under `jax.pmap`: one slice of the arguments per device, one configuration for all devices.

    Args:
        kernel: The kernel to run.
        axis_name: Name of the device axis, for collectives inside the kernel.
        in_axes: Axes of the positional arguments to split over devices, as in `jax.pmap`.
        out_axes: Axes along which the results are concatenated.
        cfg: The configuration; `None` lets the executor choose one.
        executor: The executor that runs the kernel; the default executor if omitted.
        **pmap_options: `devices`, `backend`, `axis_size`.
    """
    transform = functools.partial(jax.pmap, axis_name=axis_name, in_axes=in_axes, out_axes=out_axes, **pmap_options)
    return _mapped(kernel, transform, cfg, executor)


def _mapped(
    kernel: Kernel[Cfg, Out],
    transform: Callable[[Callable[..., Any]], Callable[..., Any]],
    cfg: Cfg | None,
    executor: Executor[Any, Any] | None,
) -> Callable[..., Any]:
    """Return the kernel under `transform`, run by the executor or by the default executor at the time of each call."""
    unbound(kernel, ())  # an error for a class
    check_argument(callable(kernel), "kernel", "a Kernel", kernel)

    # Apply the transformation at each call: keyword arguments are not batched, and the default executor may change.
    def mapped(*args: Any, **kwargs: object) -> Any:
        options = kwargs if cfg is None else {"cfg": cfg, **kwargs}
        return transform(functools.partial(executor or default_executor(), kernel, **options))(*args)

    return mapped
