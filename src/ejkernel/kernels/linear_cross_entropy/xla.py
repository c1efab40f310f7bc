# SPDX-License-Identifier: Apache-2.0
"""The loss in plain JAX: a loop over chunks of rows, or over chunks of the vocabulary.

Chunks of rows have complete logits, so their gradients are made at once: three products in all, and a sum for the
weight's gradient as large as the weight. Chunks of the vocabulary need the log-sum-exp first and then their logits
again: four products, but no such sum, and less memory.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from ejkernel.kernels._numbers import accumulator
from ejkernel.kernels._options import POSITIVE, check_parameters
from ejkernel.ops.implementation import Implementation
from ejkernel.ops.utils.messages.names import NamedFields

from ._chunks import estimated_bytes, heuristic_chunks, space_of_chunks
from ._xla_loops import gradients_by_columns, gradients_by_rows, statistics_by_columns, statistics_by_rows
from ._xla_problem import Problem
from .common import (
    GRADIENTS,
    STATISTICS,
    LinearCrossEntropyCall,
    Statistics,
    coefficients_of_loss,
    coefficients_of_statistics,
    counted_columns,
    merged_on_all_devices,
)
from .operation import RESIDUALS

_FEATURES = frozenset(
    (
        "bias",
        "label_smoothing",
        "z_loss",
        "logits_soft_cap",
        "logits_scale",
        "precision",
        "accumulation_dtype",
        *(f"statistic {name!r}" for name in STATISTICS),
    )
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class XlaParams(NamedFields):
    """Parameters of a forward or backward.

    Attributes:
        form: `rows`: chunks of rows; `vocabulary`: chunks of columns of the logits.
        chunk: Rows or columns per chunk; `None` processes all at once.
        accumulation_dtype: Dtype of the sum of the weight's gradient over chunks of rows; `None`: float32. The
            argument `accumulation_dtype` of the call takes precedence.
    """

    form: str = "rows"
    chunk: int | None = None
    accumulation_dtype: str | None = None

    def __post_init__(self) -> None:
        dtypes = ("float32", "bfloat16", "float16", "float64")
        check_parameters(self, form=("rows", "vocabulary"), chunk=POSITIVE, accumulation_dtype=dtypes)


class _Chunked(Implementation[LinearCrossEntropyCall]):
    name = "xla"
    params = XlaParams
    residuals = RESIDUALS
    differentiable = True
    features = _FEATURES

    def heuristic(self, call: LinearCrossEntropyCall) -> XlaParams:
        """Return chunks that fit in the caches of a CPU, or keep the products of an accelerator large."""
        form, chunk = heuristic_chunks(call)
        return XlaParams(form=form, chunk=chunk)

    def space(self, call: LinearCrossEntropyCall) -> list[XlaParams]:
        """Return chunks of several sizes with temporary arrays that fit within the memory limit."""
        found = [XlaParams(form=form, chunk=chunk) for form, chunk in space_of_chunks(call)]
        return list(dict.fromkeys((self.heuristic(call), *found)))

    def temporaries(self, call: LinearCrossEntropyCall, params: XlaParams) -> int:
        """Return an estimate of the bytes of temporary arrays."""
        return estimated_bytes(call, params.form, params.chunk)


class Xla(_Chunked):
    """Statistics in plain JAX: supports every call on every platform."""

    def forward(self, call: LinearCrossEntropyCall, /, *args: Any, params: XlaParams) -> tuple[Any, tuple[()]]:
        """Return the statistics."""
        by_chunks = statistics_by_columns if params.form == "vocabulary" else statistics_by_rows
        return _wanted(call, by_chunks(Problem.of(call, *args), params.chunk)).results(), ()

    def backward(
        self, call: LinearCrossEntropyCall, residuals: Any, out: Any, cotangents: Any, /, *args: Any, params: XlaParams
    ) -> tuple[jax.Array | None, ...]:
        """Return the gradients of `x`, the weight and the bias; the logits are computed again."""
        problem = Problem.of(call, *args)
        found, given = (
            Statistics.of([y.astype(problem.wide) for y in ys], call.statistics) for ys in (out, cotangents)
        )
        coefficients = coefficients_of_statistics(found, given)
        if params.form == "vocabulary":
            made = gradients_by_columns(problem, params.chunk, coefficients, found.lse)
        else:
            how = params.chunk, _sum_dtype(call, params), lambda part, values, own, lse: (own, lse, None)
            made, _ = gradients_by_rows(problem, *how, coefficients, found.lse)
        return made["x"], made["weight"], None, *([] if problem.bias is None else [made["bias"]])


class XlaGradients(_Chunked):
    """Statistics and gradients in plain JAX: supports every call on every platform."""

    features = _FEATURES | {"vocab_axis"}

    def forward(self, call: LinearCrossEntropyCall, /, *args: Any, params: XlaParams) -> tuple[Any, tuple[()]]:
        """Return the statistics and the gradients that the call wants."""
        x, weight, labels, factors, *bias = args
        problem = Problem.of(call, x, weight, labels, *bias)
        columns = counted_columns(problem.bias, call.columns, call.vocab_axis)
        factors = factors.astype(problem.wide)
        if params.form == "vocabulary":
            found = merged_on_all_devices(statistics_by_columns(problem, params.chunk), call.vocab_axis)
            coefficients = coefficients_of_loss(call, found.lse, factors, columns)
            made = gradients_by_columns(problem, params.chunk, coefficients, found.lse)
        else:
            how = params.chunk, _sum_dtype(call, params), _Complete(columns)
            made, found = gradients_by_rows(problem, *how, factors)
        return (*_wanted(call, found).results(), *(made[name] for name in GRADIENTS if name in call.gradients)), ()


@dataclasses.dataclass(frozen=True)
class _Complete:
    """The statistics and coefficients of rows with complete logits, at least together with other devices."""

    columns: Any

    def __call__(self, part: Problem, values: jax.Array, factors: jax.Array, lse: None) -> Any:
        """Return the coefficients, the log-sum-exp, and the statistics."""
        call = part.call
        found = merged_on_all_devices(part.statistics(values).finished(part.factor), call.vocab_axis)
        return coefficients_of_loss(call, found.lse, factors, self.columns), found.lse, found


def _sum_dtype(call: LinearCrossEntropyCall, params: XlaParams) -> str:
    return call.accumulation_dtype or params.accumulation_dtype or str(accumulator(call.dtype))


def _wanted(call: LinearCrossEntropyCall, found: Statistics) -> Statistics:
    """Return the statistics without those that the call does not return."""
    left_out: dict[str, Any] = {name: None for name in STATISTICS if name not in call.statistics}
    return found._replace(**left_out)
