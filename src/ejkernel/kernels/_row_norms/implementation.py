# SPDX-License-Identifier: Apache-2.0
"""The implementation on Hopper GPUs."""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar

import jax

from ejkernel.kernels import _hopper as hopper
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.implementation import Implementation
from ejkernel.ops.utils.values.signature import is_known

from . import launch
from .common import RESIDUALS, RowNormCall
from .plan import SHORT, SLAB, THREADS, RowNormParams, RowNormPlan

CallT = TypeVar("CallT", bound=RowNormCall)

_DTYPES = (*hopper.DTYPES, "float32")
_SHORTEST = 64  # elements; the length of a short row is a multiple
_SHORT_KNOWN = 256  # elements, the longest measured short rows
_NARROW = 128  # elements of a row up to which XLA's forward is as fast
_AT_ONCE = 1 << 14  # elements of short rows that a forward reads at once
_FEW = 1 << 23  # elements of all rows up to which XLA's forward is as fast
_MULTIPROCESSOR = 233_472  # bytes of shared memory of a multiprocessor
_RESERVED = 2048  # bytes of it that a block of threads may need beside its buffers
_OCCUPANCY = (1, 2, 3, 4, 6, 8)


class MosaicGpu(Implementation[CallT], Generic[CallT]):
    """Normalises rows, and sums gradients, in shared memory or registers."""

    name = "mosaic_gpu"
    params = RowNormParams
    residuals: ClassVar[str | None] = RESIDUALS
    features = frozenset(("weight=None", "weight_offset", "residual"))

    def unsupported(self, call: CallT) -> str | None:
        """Return why `call` does not run, and an alternative; `None` if it runs."""
        if not is_known(call.all_rows, call.dim) or not call.rows:
            return "it needs a static number of rows above 0; use 'xla'."
        if call.dtype not in _DTYPES:
            return f"x has dtype {call.dtype}; 'mosaic_gpu' supports {', '.join(_DTYPES)}; cast it, or use 'xla'."
        is_short = call.dim < SHORT
        if call.dim % (_SHORTEST if is_short else THREADS):
            return (
                f"x has rows of {call.dim} elements; 'mosaic_gpu' supports multiples of {_SHORTEST} below {SHORT}, "
                f"and of {THREADS} above; use 'xla'."
            )
        if is_short and call.rows % SLAB:
            return f"x has {call.rows} short rows; 'mosaic_gpu' supports multiples of {SLAB}; use 'xla'."
        if self.params_fault(call, RowNormParams(block_rows=SLAB if is_short else 1, stages=1, occupancy=1)):
            where = "registers" if is_short else "shared memory"
            return f"x has rows of {call.dim} elements, too long for {where}; use 'xla'."
        return hopper.unavailable(call, "x", "'xla'")

    def preference(self, call: CallT) -> int:
        """Return -1 where XLA is as fast or faster, else 0.

        XLA is as fast for small arrays, and for forwards that only sum squares. It is faster for gradients of weights
        with separate sums for many examples.
        """
        much = call.all_rows * call.dim > _FEW
        known = call.dim >= SHORT or (much and call.dim <= _SHORT_KNOWN)
        if call.backward:
            return 0 if call.examples == 1 and known else -1
        # On one H200, XLA's time over ours: 0.96 to 1.08 for rms_norm's forward; 1.03 to 1.49 for layer_norm's, but
        # 0.93 and 0.97 for rows of 64 and 128; with a residual 1.14 to 1.49 for both, 1.16 to 1.27 for rows below 512.
        centred = call.formula.centred and much and call.dim > _NARROW
        return 0 if known and (centred or call.residual) else -1

    def params_fault(self, call: CallT, params: RowNormParams) -> str | None:
        """Return why the call cannot run with these parameters; `None` if it can."""
        plan = self._plan(call, params)
        needed = plan.shared_bytes()
        if call.rows % params.block_rows:
            return f"block_rows must divide {call.rows}, the number of rows, got {params.block_rows}."
        if plan.is_short:
            return plan.short_fault()
        if needed > hopper.SHARED_MEMORY:
            return f"it needs {needed} bytes of shared memory; a block of threads has {hopper.SHARED_MEMORY}."
        return None

    def heuristic(self, call: CallT) -> RowNormParams:
        """Return the highest occupancy that fits, with one row at a time; two rows at occupancy 1.

        For short rows, as many at a time as fit in registers; fewer for gradients.
        """
        if call.dim < SHORT:
            return self._short_heuristic(call)
        for occupancy in reversed(_OCCUPANCY):
            params = RowNormParams(block_rows=1 + (occupancy == 1), occupancy=occupancy)
            if self._fits(call, params):
                return params
        params = RowNormParams(occupancy=1)
        return params if self._fits(call, params) else RowNormParams(stages=1, occupancy=1)

    def _short_heuristic(self, call: CallT) -> RowNormParams:
        """Return the best parameters, or nearly, for a quarter to one million rows on one H200."""
        occupancy = 4 if call.backward and call.dim > _SHORTEST else 16
        at_most = 16 * (1 + (call.dim > _NARROW)) if call.backward else _AT_ONCE // call.dim
        fitting = [params.block_rows for params in self.space(call) if params.occupancy == occupancy]
        block_rows = max(rows for rows in fitting if rows <= max(at_most, SLAB))
        return RowNormParams(block_rows=block_rows, stages=1, occupancy=occupancy)

    def space(self, call: CallT) -> ConfigSpace[RowNormParams]:
        """Return the search space: all parameters that fit."""

        def fits(block_rows: int, stages: int, occupancy: int) -> bool:
            return self._fits(call, RowNormParams(block_rows=block_rows, stages=stages, occupancy=occupancy))

        axes = {"block_rows": (1, 2, 4), "stages": (1, 2, 3, 4), "occupancy": _OCCUPANCY}
        if call.dim < SHORT:
            axes = {"block_rows": (16, 32, 64, 128), "stages": (1,), "occupancy": (*_OCCUPANCY, 12, 16)}
        return ConfigSpace(axes, constraints=fits, build=RowNormParams)

    def _fits(self, call: CallT, params: RowNormParams) -> bool:
        room = params.occupancy * (self._plan(call, params).shared_bytes() + _RESERVED) <= _MULTIPROCESSOR
        return room and self.params_fault(call, params) is None

    def _plan(self, call: CallT, params: RowNormParams) -> RowNormPlan:
        return RowNormPlan(
            rows=call.rows,
            dim=call.dim,
            dtype=call.dtype,
            formula=call.formula,
            backward=call.backward,
            params=params,
        )

    def forward(self, call: CallT, /, *args: Any, params: RowNormParams) -> tuple[Any, Any]:
        """Return the output, and the statistics of each row."""
        x, *vectors, residual = args if call.residual else (*args, None)
        rows = [x] if residual is None else [x, residual]
        found = launch.normalize(call.formula, params, rows, [v for v in vectors if v is not None])
        outs, stats = found[: len(rows)], found[len(rows) :]
        return (outs if call.residual else outs[0]), (stats if len(stats) > 1 else stats[0])

    def backward(
        self,
        call: CallT,
        residuals: Any,
        out: Any,
        cotangents: tuple[Any, ...],
        /,
        *args: Any,
        params: RowNormParams,
    ) -> tuple[jax.Array | None, ...]:
        """Return the gradients."""
        # The forward returned the normalised sum: the backward reads it instead of its terms.
        x, *vectors, _ = args if call.residual else (*args, None)
        formula = call.formula
        stats = residuals if formula.centred else (residuals,)
        rows = [out[1] if call.residual else x, *cotangents]
        dx, *sums = launch.gradients(formula, params, rows, stats, [v for v in vectors if v is not None][:1])
        given = iter(sums)
        gradients = [None if v is None else next(given).astype(v.dtype) for v in vectors]
        return (dx, *gradients, dx) if call.residual else (dx, *gradients)
