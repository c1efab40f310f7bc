# SPDX-License-Identifier: Apache-2.0
"""The implementations by our own kernels, as the operations list them."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.kernels.grouped_matmul.common import GroupedMatmulCall
from ejkernel.ops.implementation import Implementation

from . import launch, support
from .params import ProductParams, WgradParams


class MosaicGpu(Implementation[GroupedMatmulCall]):
    """The product on Hopper GPUs."""

    name = "mosaic_gpu"
    params = ProductParams
    features = frozenset({"first_group"})

    def unsupported(self, call: GroupedMatmulCall) -> str | None:
        """Return why the kernel does not run the call."""
        return support.unsupported_reason(call)

    def params_fault(self, call: GroupedMatmulCall, params: ProductParams) -> str | None:
        """Return what of the chip these parameters have too little of."""
        return support.product_fault(call, params)

    def heuristic(self, call: GroupedMatmulCall) -> ProductParams:
        """Return what was fast on calls like this one."""
        return support.product_heuristic(call)

    def space(self, call: GroupedMatmulCall) -> Any:
        """Return what is worth a try."""
        return support.product_space(call)

    def forward(self, call: GroupedMatmulCall, /, *args: Any, params: ProductParams) -> tuple[jax.Array, Any]:
        """Return the product; nothing is left for a backward."""
        lhs, rhs, groups = args
        return launch.product(call, (lhs, rhs, groups), params), ()


class MosaicGpuWgrad(Implementation[GroupedMatmulCall]):
    """The weights' gradient on Hopper GPUs."""

    name = "mosaic_gpu"
    params = WgradParams
    features = frozenset({"first_group"})

    def unsupported(self, call: GroupedMatmulCall) -> str | None:
        """Return why the kernel does not run the call."""
        return support.unsupported_reason(call)

    def params_fault(self, call: GroupedMatmulCall, params: WgradParams) -> str | None:
        """Return what of the chip these parameters have too little of."""
        return support.wgrad_fault(call, params)

    def heuristic(self, call: GroupedMatmulCall) -> WgradParams:
        """Return what was fast on calls like this one."""
        return support.wgrad_heuristic(call)

    def space(self, call: GroupedMatmulCall) -> Any:
        """Return what is worth a try."""
        return support.wgrad_space(call)

    def forward(self, call: GroupedMatmulCall, /, *args: Any, params: WgradParams) -> tuple[jax.Array, Any]:
        """Return the sums; nothing is left for a backward."""
        lhs, rhs, groups = args
        return launch.weights_gradient(call, (lhs, rhs, groups), params), ()
