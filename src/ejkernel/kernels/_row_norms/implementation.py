# SPDX-License-Identifier: Apache-2.0
"""The implementation on Hopper GPUs; each operation adds its formula."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import jax

from ejkernel.kernels import _hopper as hopper
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.implementation import Implementation
from ejkernel.ops.utils.values.signature import is_known

from . import launch
from .common import RowNormCall
from .plan import SHORT, SLAB, THREADS, Formula, RowNormParams, RowNormPlan

CallT = TypeVar("CallT", bound=RowNormCall)

_DTYPES = (*hopper.DTYPES, "float32")
_SHORTEST = 64  # the length of short rows is a multiple of this
_SHORT_KNOWN = 256  # the longest of the short rows that were measured
_NARROW = 128  # XLA's forward is as fast for rows up to this length
_AT_ONCE = 1 << 14  # elements of short rows that a forward reads at once
_FEW = 1 << 23  # XLA's forward is as fast for calls up to this many elements
_MULTIPROCESSOR = 233_472  # bytes of shared memory of a multiprocessor
_RESERVED = 2048  # bytes of it that the system may reserve for each thread block
_OCCUPANCY = (1, 2, 3, 4, 6, 8)


class MosaicGpu(Implementation[CallT], Generic[CallT]):
    """A kernel that keeps rows in shared memory or registers, and sums gradients there."""

    name = "mosaic_gpu"
    params = RowNormParams

    def formula(self, call: CallT) -> Formula:
        """Return the formula of the operation for this call."""
        raise NotImplementedError

    def unsupported(self, call: CallT) -> str | None:
        """Return why the kernel does not support `call`, with an alternative; `None` if it does."""
        if not is_known(call.all_rows, call.dim) or not call.rows:
            return "it needs a known number of rows, at least 1; use 'xla'."
        if call.dtype not in _DTYPES:
            return f"x has dtype {call.dtype}, and 'mosaic_gpu' takes {', '.join(_DTYPES)}; cast it, or use 'xla'."
        is_short = call.dim < SHORT
        if call.dim % (_SHORTEST if is_short else THREADS):
            return (
                f"x has rows of {call.dim} elements, and 'mosaic_gpu' takes multiples of {_SHORTEST} below {SHORT}, "
                f"and multiples of {THREADS} from {SHORT}; use 'xla'."
            )
        if is_short and call.rows % SLAB:
            return (
                f"x has {call.rows} rows of {call.dim} elements, and 'mosaic_gpu' takes multiples of {SLAB} rows "
                f"below {SHORT} elements; use 'xla'."
            )
        if self.params_fault(call, RowNormParams(block_rows=SLAB if is_short else 1, stages=1, occupancy=1)):
            where = "registers" if is_short else "shared memory"
            return f"x has rows of {call.dim} elements, which do not fit in {where}; use 'xla'."
        return hopper.unavailable(call, "x", "'xla'")

    def preference(self, call: CallT) -> int:
        """Return -1, which leaves an untuned call to XLA, if XLA is as fast or faster; else 0.

        XLA is as fast for small calls, for forwards that only sum squares before scaling, and for backwards under
        `vmap`, which sum gradients separately for each example.
        """
        much = call.all_rows * call.dim > _FEW
        known = call.dim >= SHORT or (much and call.dim <= _SHORT_KNOWN)
        if call.backward:
            return 0 if call.examples == 1 and known else -1
        # XLA's time relative to this kernel's, forward on one H200: rms_norm 0.96 to 1.08; layer_norm 1.03 to 1.49, but
        # 0.93 and 0.97 for rows of 64 and 128; both with a residual 1.14 to 1.49, and 1.16 to 1.27 for rows below 512.
        centred = self.formula(call).centred and much and call.dim > _NARROW
        return 0 if known and (centred or call.residual) else -1

    def params_fault(self, call: CallT, params: RowNormParams) -> str | None:
        """Return why the kernel cannot run with these parameters; `None` if it can."""
        plan = self._plan(call, params)
        needed = plan.shared_bytes()
        if call.rows % params.block_rows:
            return f"block_rows must divide {call.rows}, the number of rows; got {params.block_rows}."
        if plan.is_short:
            return plan.short_fault()
        if needed > hopper.SHARED_MEMORY:
            return f"it takes {needed} bytes of shared memory, and a thread block has {hopper.SHARED_MEMORY}."
        return None

    def heuristic(self, call: CallT) -> RowNormParams:
        """Return the highest occupancy that fits with one row per copy; at occupancy 1, two rows per copy.

        For short rows, return as many rows as registers hold, but few for gradients.
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
        """Return parameters that measured best or nearly so, for a quarter to one million rows on one H200."""
        occupancy = 4 if call.backward and call.dim > _SHORTEST else 16
        at_most = 16 * (1 + (call.dim > _NARROW)) if call.backward else _AT_ONCE // call.dim
        fitting = [params.block_rows for params in self.space(call) if params.occupancy == occupancy]
        block_rows = max(rows for rows in fitting if rows <= max(at_most, SLAB))
        return RowNormParams(block_rows=block_rows, stages=1, occupancy=occupancy)

    def space(self, call: CallT) -> ConfigSpace[RowNormParams]:
        """Return the search space; its constraint excludes parameters that do not fit."""

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
            formula=self.formula(call),
            backward=call.backward,
            params=params,
        )

    def forward(self, call: CallT, /, *args: Any, params: RowNormParams) -> tuple[Any, Any]:
        """Return the output, and the statistics of every row as residuals."""
        x, *vectors, residual = args if call.residual else (*args, None)
        rows = [x] if residual is None else [x, residual]
        found = launch.normalize(self.formula(call), params, rows, [v for v in vectors if v is not None])
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
        # The forward returned the sum of x and residual, so the kernel reads only that.
        x, *vectors, _ = args if call.residual else (*args, None)
        formula = self.formula(call)
        stats = residuals if formula.centred else (residuals,)
        rows = [out[1] if call.residual else x, *cotangents]
        dx, *sums = launch.gradients(formula, params, rows, stats, [v for v in vectors if v is not None][:1])
        given = iter(sums)
        gradients = [None if v is None else next(given).astype(v.dtype) for v in vectors]
        return (dx, *gradients, dx) if call.residual else (dx, *gradients)
