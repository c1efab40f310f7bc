# SPDX-License-Identifier: Apache-2.0
"""The implementations `mosaic_gpu`."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.kernels._varying import unify_varying
from ejkernel.kernels.linear_cross_entropy._chunks import estimated_bytes, heuristic_chunks, memory_limit
from ejkernel.kernels.linear_cross_entropy.common import (
    GRADIENTS,
    STATISTICS,
    Coefficients,
    LinearCrossEntropyCall,
    Statistics,
    coefficients_of_loss,
    coefficients_of_statistics,
    counted_columns,
    merged_on_all_devices,
)
from ejkernel.kernels.linear_cross_entropy.operation import RESIDUALS
from ejkernel.ops.implementation import Implementation
from ejkernel.ops.utils.values.signature import is_known

from . import support
from .gradients import Gradients, HeadGradients, summed_over_rows
from .launch import PaddedHead, Rows
from .params import MosaicGpuParams

_FEW_LOGITS = 1 << 24
_FEATURES = frozenset(
    (
        "bias",
        "label_smoothing",
        "z_loss",
        "logits_soft_cap",
        "logits_scale",
        "accumulation_dtype",
        *(f"statistic {name!r}" for name in STATISTICS),
    )
)


class _OnHopper(Implementation[LinearCrossEntropyCall]):
    name = "mosaic_gpu"
    params = MosaicGpuParams
    residuals = RESIDUALS
    features = _FEATURES
    interpret: Any = None  # `InterpretGPUParams` in tests

    def unsupported(self, call: LinearCrossEntropyCall) -> str | None:
        """Return why the kernel does not run the call; `None` if it does."""
        return support.unsupported_reason(call)

    def params_fault(self, call: LinearCrossEntropyCall, params: MosaicGpuParams) -> str | None:
        """Return why the call cannot run with these parameters; `None` if it can."""
        return support.params_fault(call, params)

    def heuristic(self, call: LinearCrossEntropyCall) -> MosaicGpuParams:
        """Return good parameters for the shapes and the memory limit."""
        return support.heuristic(call)

    def space(self, call: LinearCrossEntropyCall) -> Any:
        """Return the search space."""
        return support.space(call)

    def temporaries(self, call: LinearCrossEntropyCall, params: MosaicGpuParams) -> int:
        """Return an estimate of the bytes of temporary arrays."""
        return support.estimated_bytes(call, params)


class MosaicGpu(_OnHopper):
    """Statistics on Hopper GPUs, without logits in memory; the backward computes the logits again."""

    def forward(
        self, call: LinearCrossEntropyCall, /, *args: Any, params: MosaicGpuParams
    ) -> tuple[tuple[jax.Array, ...], tuple[()]]:
        """Return the statistics."""
        x, weight, labels, *bias = unify_varying(args)
        head = PaddedHead.of(call, params, weight, bias[0] if bias else None, self.interpret)
        return _wanted(call, head.statistics(Rows.of(x, labels), call.statistics)).results(), ()

    def backward(
        self,
        call: LinearCrossEntropyCall,
        residuals: Any,
        out: Any,
        cotangents: Any,
        /,
        *args: Any,
        params: MosaicGpuParams,
    ) -> tuple[jax.Array | None, ...]:
        """Return the gradients of `x`, the weight and the bias."""
        (x, weight, labels, *bias), out, cotangents = unify_varying((args, out, cotangents))
        head = PaddedHead.of(call, params, weight, bias[0] if bias else None, self.interpret)
        found, given = (Statistics.of(ys, call.statistics) for ys in (out, cotangents))
        made = _from_lse(HeadGradients(head, None), x, labels, coefficients_of_statistics(found, given), found.lse)
        gradients = _cropped(made, head, bias[0] if bias else None)
        return gradients["x"], gradients["weight"], None, *([gradients["bias"]] if bias else [])


class MosaicGpuGradients(_OnHopper):
    """Statistics and gradients on Hopper GPUs: three products, or four with chunks of the vocabulary."""

    features = _FEATURES | {"vocab_axis"}

    def preference(self, call: LinearCrossEntropyCall) -> int:
        """Return -1 where XLA's three products with all logits in memory should be faster, else 0."""
        # On one H200, ours and XLA's: 61 and 40 us for 70 rows of 384 and 12,832 columns; 310 and 218 for 1,559 rows of
        # 6,912 and 2,280 columns; 2,006 and 1,727 for 157 of 6,080 and 89,800. With more logits: 5,327 and 4,893 for
        # 708 of 6,144 and 127,120, and 5,425 and 5,669 for 751 of 4,864 and 170,440.
        if not is_known(call.tokens, call.inner, call.columns):
            return 0
        has_few = call.tokens * call.columns <= _FEW_LOGITS
        fits = has_few and estimated_bytes(call, "rows", None) <= memory_limit(call)
        return -1 if fits and heuristic_chunks(call) == ("rows", None) else 0

    def forward(
        self, call: LinearCrossEntropyCall, /, *args: Any, params: MosaicGpuParams
    ) -> tuple[tuple[jax.Array, ...], tuple[()]]:
        """Return the statistics and the gradients that the call wants."""
        x, weight, labels, factors, *others = unify_varying(args)
        bias = others[0] if others else None
        head = PaddedHead.of(call, params, weight, bias, self.interpret)
        gradients = HeadGradients(head, counted_columns(bias, call.columns, call.vocab_axis))
        if params.form == "rows":

            def of_rows(rows: Any, dtype: Any, total: Any) -> tuple[Gradients, Statistics]:
                x, labels, factors, _ = rows
                return gradients.of_loss(x, labels, factors, dtype, total)

            made, found = summed_over_rows(of_rows, (x, labels, factors), head, _sum_dtype(head))
        else:
            found = merged_on_all_devices(head.statistics(Rows.of(x, labels), call.statistics), call.vocab_axis)
            given = coefficients_of_loss(call, found.lse, factors.astype(found.lse.dtype), gradients.columns)
            made = _from_lse(gradients, x, labels, given, found.lse)
        by_name = _cropped(made, head, bias)
        return (*_wanted(call, found).results(), *(by_name[name] for name in GRADIENTS if name in call.gradients)), ()


def _from_lse(
    gradients: HeadGradients, x: jax.Array, labels: jax.Array, given: Coefficients, lse: jax.Array
) -> Gradients:
    head = gradients.head
    given, lse, _ = unify_varying((given, lse, x))
    if head.params.form == "vocabulary":
        return gradients.by_columns(x, labels, given, lse, head.params.chunk)

    def of_rows(rows: Any, dtype: Any, total: Any) -> tuple[Gradients, None]:
        x, labels, given, lse = rows
        return gradients.by_rows(x, labels, given, lse, dtype, total), None

    return summed_over_rows(of_rows, (x, labels, given), head, _sum_dtype(head), lse)[0]


def _sum_dtype(head: PaddedHead) -> str:
    return head.call.accumulation_dtype or head.params.accumulation_dtype or "float32"


def _cropped(made: Gradients, head: PaddedHead, bias: jax.Array | None) -> dict[str, Any]:
    """Return the gradients by name, without padding and in the arguments' dtypes."""
    call = head.call
    sizes = (call.columns, call.inner) if call.transpose_weight else (call.inner, call.columns)
    dbias = None if bias is None or made.bias is None else made.bias[: call.columns].astype(bias.dtype)
    return {"x": made.x[:, : call.inner], "weight": made.weight[: sizes[0], : sizes[1]], "bias": dbias}


def _wanted(call: LinearCrossEntropyCall, found: Statistics) -> Statistics:
    """Return the statistics without those that the call does not return."""
    dropped: dict[str, Any] = {name: None for name in STATISTICS if name not in call.statistics}
    return found._replace(**dropped)
