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
from ejkernel.ops.utils.checks import check_argument


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
    check_argument(callable(kernel), "kernel", "a Kernel", kernel)

    def batched(*args: Any, **kwargs: object) -> Any:
        call = functools.partial(executor or default_executor(), kernel, cfg=cfg, **kwargs)
        return jax.vmap(call, in_axes=in_axes, out_axes=out_axes, **vmap_options)(*args)

    return batched


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
    check_argument(callable(kernel), "kernel", "a Kernel", kernel)

    def parallel(*args: Any, **kwargs: object) -> Any:
        call = functools.partial(executor or default_executor(), kernel, cfg=cfg, **kwargs)
        return jax.pmap(call, axis_name=axis_name, in_axes=in_axes, out_axes=out_axes, **pmap_options)(*args)

    return parallel
