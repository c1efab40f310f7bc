# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.estimates_tpu`: estimates for TPUs beside published times; needs `jax[tpu]`, but no TPU.

The matrix products are those of a published table for one TPU v5e: the time of a call, measured there with 110 us of
dispatch, which the estimate leaves out. The other rows have no published time; they compare implementations, and show
what the simulator refuses.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops import Kernel
from ejkernel.ops.autotuner.compile.estimating import estimate_calls
from ejkernel.ops.autotuner.compile.simulation import METHOD
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.config.estimates import EstimatedRow
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.execution.discovery import discover_for
from ejkernel.ops.utils.formatting import compact
from ejkernel.ops.utils.storage.serialize import from_data

DISPATCH = 110  # microseconds of each published time
TIMEOUT = 1200.0  # seconds for one candidate, on a busy machine


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of a matrix product; zeros for XLA's product."""

    rows: int = 0
    inner: int = 0
    columns: int = 0


class Product(Kernel[Blocks, jax.Array]):
    """`a @ b` by XLA, or in Pallas with one accumulator for each block of the result."""

    def run(self, a: jax.Array, b: jax.Array, *, cfg: Blocks) -> jax.Array:
        """Return the product."""
        return product(a, b, cfg) if cfg.rows else jnp.dot(a, b)

    def heuristic_cfg(self, inv: Invocation[Blocks, jax.Array]) -> Blocks:
        """Return XLA's product."""
        return Blocks()


def product(a: jax.Array, b: jax.Array, blocks: Blocks, *, columns_first: bool = False) -> jax.Array:
    """Return the product in Pallas; with `columns_first`, the blocks of columns are the outermost loop."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def body(left: Any, right: Any, out: Any, total: Any) -> None:
        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        total[...] += jnp.dot(left[...], right[...], preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _() -> None:
            out[...] = total[...].astype(out.dtype)

    (rows, inner), columns = a.shape, b.shape[1]
    grid = (rows // blocks.rows, columns // blocks.columns)

    def at(*axes: int) -> Any:
        order = (1, 0, 2) if columns_first else (0, 1, 2)
        return lambda *steps: tuple(steps[order[axis]] for axis in axes)

    found: jax.Array = pl.pallas_call(
        body,
        grid=(*(grid[::-1] if columns_first else grid), inner // blocks.inner),
        in_specs=[
            pl.BlockSpec((blocks.rows, blocks.inner), at(0, 2)),
            pl.BlockSpec((blocks.inner, blocks.columns), at(2, 1)),
        ],
        out_specs=pl.BlockSpec((blocks.rows, blocks.columns), at(0, 1)),
        out_shape=jax.ShapeDtypeStruct((rows, columns), a.dtype),
        scratch_shapes=[pltpu.VMEM((blocks.rows, blocks.columns), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )(a, b)
    return found


# size, blocks, published microseconds with dispatch
PUBLISHED = ((1024, Blocks(128, 128, 128), 298), (4096, Blocks(), 827), (4096, Blocks(512, 1024, 1024), 889))
SOURCE = "the guide to matrix products in docs.jax.dev/en/latest/pallas/tpu"


def products() -> list[dict[str, Any]]:
    """Return the estimates of the published matrix products."""
    kernel, target, found = Product("benchmark_product"), Target.named("tpu_v5e"), []
    for size in sorted({size for size, _, _ in PUBLISHED}):
        like = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
        blocks = [blocks for of, blocks, _ in PUBLISHED if of == size]
        inv = Invocation(kernel=kernel, args=(like, like))
        (estimates,) = estimate_calls([inv], target, candidates=functools.partial(_these, blocks), timeout_s=TIMEOUT)
        rows = {from_data(row.config, Blocks): row for row in estimates.rows}
        found += [_beside(size, of, us - DISPATCH, rows[of]) for at, of, us in PUBLISHED if at == size]
    return found


def _these(blocks: list[Blocks], inv: Invocation[Any, Any]) -> list[Blocks]:
    return blocks


def _beside(size: int, blocks: Blocks, published: float, row: EstimatedRow) -> dict[str, Any]:
    return {
        "target": "tpu_v5e",
        "case": f"product of {size} by {size}, {compact(blocks) if blocks.rows else 'XLA'}",
        "estimated_us": row.us,
        "published_us": published,
        "ratio": None if row.us is None else round(row.us / published, 3),
        "reason": row.reason,
    }


def calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return the calls of ejkernel's operations to compare."""
    from ejkernel.modules import flash_attention, layer_norm, rms_norm

    x, w = jax.ShapeDtypeStruct((2048, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((1024,), jnp.bfloat16)
    q = jax.ShapeDtypeStruct((1, 1024, 2, 128), jnp.bfloat16)
    return {
        "rms_norm": (jax.jit(rms_norm), (x, w)),
        "layer_norm": (jax.jit(layer_norm), (x, w, w)),
        "flash_attention, causal": (jax.jit(functools.partial(flash_attention, causal=True)), (q, q, q)),
    }


def operations(target: Target) -> list[dict[str, Any]]:
    """Return the fastest estimate of each implementation of each call."""
    found = []
    for name, (function, args) in calls().items():
        with target.entered():
            invs = discover_for(function, args, {}, platform=target.platform)
        for estimates in estimate_calls(invs, target, timeout_s=TIMEOUT):
            by_implementation: dict[str, list[Any]] = {}
            for row in estimates.rows:
                by_implementation.setdefault(row.config["implementation"], []).append(row)
            for implementation, rows in by_implementation.items():
                best = min((row.us for row in rows if row.us is not None), default=None)
                reasons = sorted({row.reason for row in rows if row.reason})
                found.append(
                    {
                        "target": target.name,
                        "case": f"{name} {estimates.key['op']}: {implementation}",
                        "estimated_us": best,
                        "configurations": f"{sum(row.us is not None for row in rows)} of {len(rows)}",
                        "reason": "; ".join(reasons)[:300],
                    }
                )
    return found


def main() -> None:
    """Estimate, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/estimates_tpu.json"))
    parser.add_argument("--targets", nargs="+", default=["tpu_v5e", "tpu_v6e"])
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    results = [row for name in given.targets for row in operations(Target.named(name))] + products()
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    data = {
        "what": "estimates; nothing ran on a TPU; the published times were measured by others, on one TPU v5e",
        "published": SOURCE,
        "method": METHOD,
        "device": "none: simulated by libtpu on a CPU",
        "versions": versions,
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "results": results,
    }
    given.out.write_text(json.dumps(data, indent=2) + "\n")
    for row in results:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
