# SPDX-License-Identifier: Apache-2.0
"""The implementations `mosaic_gpu` of grouped products."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from ejkernel.kernels.grouped_matmul.common import GroupedMatmulCall
from ejkernel.kernels.grouped_matmul.epilogue import PREACTIVATIONS
from ejkernel.ops.implementation import Implementation

from . import launch, support
from .params import ProductParams, WgradParams


class _Product(Implementation[GroupedMatmulCall]):
    """The product, with or without an epilogue."""

    name = "mosaic_gpu"
    params = ProductParams

    def unsupported(self, call: GroupedMatmulCall) -> str | None:
        """Return why the kernel does not run the call; `None` if it does."""
        return support.unsupported_reason(call)

    def params_fault(self, call: GroupedMatmulCall, params: ProductParams) -> str | None:
        """Return why the call cannot run with these parameters; `None` if it can."""
        return support.product_fault(call, params)

    def heuristic(self, call: GroupedMatmulCall) -> ProductParams:
        """Return good parameters, measured on similar calls."""
        return support.product_heuristic(call)

    def space(self, call: GroupedMatmulCall) -> Any:
        """Return the search space."""
        return support.product_space(call)


class MosaicGpu(_Product):
    """The product on Hopper GPUs."""

    features = frozenset({"row_scale", "first_group"})

    def forward(self, call: GroupedMatmulCall, /, *args: Any, params: ProductParams) -> tuple[jax.Array, Any]:
        """Return the product, without residuals."""
        return launch.product(call, args, params), ()


class MosaicGpuActivation(_Product):
    """Products and their epilogue on Hopper GPUs, in one kernel."""

    residuals = PREACTIVATIONS
    features = frozenset({"activation", "gate", "row_scale", "first_group"})

    def forward(self, call: GroupedMatmulCall, /, *args: Any, params: ProductParams) -> tuple[jax.Array, Any]:
        """Return the output, and the products as residuals."""
        # The kernel writes output and products in one dtype.
        keeping = dataclasses.replace(call, out_dtype=call.kept_dtype)
        out, *products = launch.product_keeping(keeping, _given(args), params)
        return out.astype(call.out_dtype), tuple(products)

    def output(self, call: GroupedMatmulCall, /, *args: Any, params: ProductParams) -> jax.Array:
        """Return the output alone; the kernel writes no products."""
        return launch.product(call, _given(args), params)


class MosaicGpuWgrad(Implementation[GroupedMatmulCall]):
    """The weight gradient on Hopper GPUs."""

    name = "mosaic_gpu"
    params = WgradParams
    features = frozenset({"first_group"})

    def unsupported(self, call: GroupedMatmulCall) -> str | None:
        """Return why the kernel does not run the call; `None` if it does."""
        return support.unsupported_reason(call)

    def params_fault(self, call: GroupedMatmulCall, params: WgradParams) -> str | None:
        """Return why the call cannot run with these parameters; `None` if it can."""
        return support.wgrad_fault(call, params)

    def heuristic(self, call: GroupedMatmulCall) -> WgradParams:
        """Return good parameters, measured on similar calls."""
        return support.wgrad_heuristic(call)

    def space(self, call: GroupedMatmulCall) -> Any:
        """Return the search space."""
        return support.wgrad_space(call)

    def forward(self, call: GroupedMatmulCall, /, *args: Any, params: WgradParams) -> tuple[jax.Array, Any]:
        """Return the weight gradient, without residuals."""
        lhs, rhs, groups = args
        return launch.weights_gradient(call, (lhs, rhs, groups), params), ()


def _given(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arg for arg in args if arg is not None)
