# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.estimates_tpu`: estimates for TPUs beside published times; needs `jax[tpu]`, but no TPU.

The matrix products are those of a published table for one TPU v5e. Its times contain the dispatch of a call, which
estimates leave out. So the compared time is that by which a larger product takes longer. The other rows have no
published time; they compare implementations, and show what the simulator refuses.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.ops import Kernel
from ejkernel.ops.autotuner.compile.estimating import estimate_calls
from ejkernel.ops.autotuner.compile.simulation import METHOD
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.execution.discovery import discover_for
from ejkernel.ops.utils.formatting import compact
from ejkernel.ops.utils.storage.serialize import from_plain

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


class Published(NamedTuple):
    """Published microseconds of calls at two sizes, and the sizes to estimate: simulations take long, and gigabytes."""

    blocks: Blocks
    us: dict[int, float]
    sizes: tuple[int, ...]


PUBLISHED = (
    Published(Blocks(), {4096: 827.3, 8192: 6047.1}, (4096,)),
    Published(Blocks(512, 1024, 1024), {4096: 889.1, 8192: 6099.4}, (2048, 4096)),
    Published(Blocks(128, 128, 128), {4096: 11771.5, 8192: 91835.8}, (1024, 2048)),
)
SOURCE = "the guide to matrix products in docs.jax.dev/en/latest/pallas/tpu"


def products() -> list[dict[str, Any]]:
    """Return the estimates of the published matrix products, in microseconds per product of 1,024-cubed matrices."""
    kernel, target, found = Product("benchmark_product"), Target.named("tpu_v5e"), []
    for blocks, published, sizes in PUBLISHED:
        estimated: dict[int, float] = {}
        for size in sizes:
            like = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
            inv = Invocation(kernel=kernel, args=(like, like))
            (estimates,) = estimate_calls(
                [inv], target, candidates=functools.partial(_these, [blocks]), timeout_s=TIMEOUT
            )
            (row,) = (row for row in estimates.rows if from_plain(row.config, Blocks) == blocks)
            estimated[size] = row.us or math.nan
        mine, theirs = _rate(estimated), _rate(published)
        found.append(
            {
                "target": "tpu_v5e",
                "case": f"product, {compact(blocks) if blocks.rows else 'XLA'}",
                "estimated_us": estimated,
                "published_us": published,
                "estimated_rate": round(mine, 3),
                "published_rate": round(theirs, 3),
                "ratio": round(mine / theirs, 3),
            }
        )
        print(json.dumps(found[-1]), flush=True)
    return found


def _these(blocks: list[Blocks], inv: Invocation[Any, Any]) -> list[Blocks]:
    return blocks


def _rate(us: dict[int, float]) -> float:
    """Return the additional time per product of 1,024-cubed matrices, without the time that both calls have."""
    (small, first), (large, second) = sorted({0: 0.0, **us}.items())[-2:]
    return (second - first) / ((large / 1024) ** 3 - (small / 1024) ** 3)


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
    parser.add_argument("--targets", nargs="*", default=["tpu_v5e", "tpu_v6e"], help="of the operations")
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    kept = json.loads(given.out.read_text())["results"] if given.out.exists() else []
    results = [row for row in kept if not row["case"].startswith("product") and row["target"] not in given.targets]
    results += [row for name in given.targets for row in operations(Target.named(name))] + products()
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


if __name__ == "__main__":
    main()
