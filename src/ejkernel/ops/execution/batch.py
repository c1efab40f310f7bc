# SPDX-License-Identifier: Apache-2.0
"""Kernels over batches and over devices, with one configuration for all of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.execution.executor import Executor, default_executor
from ejkernel.ops.utils.validation import check_argument


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
        kernel: What to run.
        in_axes: Batch axes of the positional arguments, as in `jax.vmap`. Keyword arguments are not batched.
        out_axes: Batch axes of the results.
        cfg: The configuration to run with; `None` lets the executor find one.
        executor: Who runs it; the default executor if left out.
        **vmap_options: `axis_name`, `axis_size`, `spmd_axis_name`.
    """
    over = functools.partial(jax.vmap, in_axes=in_axes, out_axes=out_axes, **vmap_options)
    return _mapped(kernel, over, cfg, executor)


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
    """Return `kernel` run on one slice of its arguments a device, with one configuration for all devices.

    Args:
        kernel: What to run.
        axis_name: Name of the device axis, for collectives inside the kernel.
        in_axes: Axes of the positional arguments that are split over devices, as in `jax.pmap`.
        out_axes: Axes along which the results are put together.
        cfg: The configuration to run with; `None` lets the executor find one.
        executor: Who runs it; the default executor if left out.
        **pmap_options: `devices`, `backend`, `axis_size`.
    """
    over = functools.partial(jax.pmap, axis_name=axis_name, in_axes=in_axes, out_axes=out_axes, **pmap_options)
    return _mapped(kernel, over, cfg, executor)


def _mapped(
    kernel: Kernel[Cfg, Out],
    over: Callable[[Callable[..., Any]], Callable[..., Any]],
    cfg: Cfg | None,
    executor: Executor[Any, Any] | None,
) -> Callable[..., Any]:
    """Return the kernel, transformed by `over`, as whoever is the executor when it is called runs it."""
    check_argument(callable(kernel), "kernel", "a Kernel", kernel)

    # Transformed at each call, for keyword arguments are not batched, and the default executor may be another by then.
    def mapped(*args: Any, **kwargs: object) -> Any:
        return over(functools.partial(executor or default_executor(), kernel, cfg=cfg, **kwargs))(*args)

    return mapped
