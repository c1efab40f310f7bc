# SPDX-License-Identifier: Apache-2.0
"""Bundles and estimates for TPUs that are not here, by Google's compiler: `make test-tpu`."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from ejkernel.modules import flash_attention
from ejkernel.ops.autotuner.compile.bundles import compile_bundle
from ejkernel.ops.autotuner.compile.estimating import estimate_calls
from ejkernel.ops.autotuner.compile.prepared import bundle_as_text
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.execution.discovery import discover_for

pytest.importorskip("libtpu")
pytestmark = pytest.mark.slow

X = jax.ShapeDtypeStruct((512, 256), jnp.float32)


@dataclasses.dataclass(frozen=True)
class Way:
    """How to compute `x + x`: by XLA, in a loop of XLA, in Pallas with so many rows, or with scalar prefetch."""

    name: str
    rows: int = 0


class OnTpu(Kernel[Way, jax.Array]):
    """`x + x`."""

    def run(self, x, *, cfg):
        if cfg.name == "xla":
            return x + x
        if cfg.name == "loop":
            return jax.lax.map(lambda row: row + row, x.reshape(8, 64, 256)).reshape(x.shape)
        if cfg.name == "bfloat16":  # the simulator has no such product, and ends its process
            small = x.astype(jnp.bfloat16)
            return _in_pallas(lambda source, target: target.__setitem__(..., source[...] * 2), small, 128).astype(
                x.dtype
            )
        if cfg.name == "prefetch":
            return _prefetched(x)
        return _in_pallas(lambda source, target: target.__setitem__(..., source[...] + source[...]), x, cfg.rows)

    def heuristic_cfg(self, inv):
        return Way("xla")

    def config_space(self, inv):
        return [Way("loop"), Way("pallas", 128), Way("pallas", 100)]


def _in_pallas(body, x, rows):
    from jax.experimental import pallas as pl

    block = pl.BlockSpec((rows, 256), lambda i: (i, 0))
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(body, grid=(x.shape[0] // rows,), in_specs=[block], out_specs=block, out_shape=like)(x)


def _prefetched(x):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def body(order, source, target):
        target[...] = source[...] + source[...]

    block = pl.BlockSpec((128, 256), lambda i, order: (order[i], 0))
    grid = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(4,), in_specs=[block], out_specs=block)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(body, grid_spec=grid, out_shape=like)(jnp.arange(4), x)


CALL = Invocation(kernel=OnTpu("on_tpu"), args=(X,))


def test_candidates_are_compiled_or_have_the_compilers_reason(tmp_path):
    (call,) = compile_bundle([CALL], Target.named("tpu_v5e"), tmp_path / "bundle", processes=1)
    outcomes = {each.outcome.config: each.outcome for each in call.candidates}
    ready = [config for config, outcome in outcomes.items() if outcome.status == "ready"]
    assert ready == [Way("xla"), Way("loop"), Way("pallas", 128)]
    assert "divisible" in outcomes[Way("pallas", 100)].reason
    sizes = {each.outcome.config: each.program.vector_memory for each in call.candidates if each.program}
    # windows of 128 rows, two of each array, which XLA may give to the kernel
    assert (sizes[Way("xla")], sizes[Way("loop")]) == (None, None)
    assert sizes[Way("pallas", 128)] <= 4 * 128 * 256 * 4 + 2**20
    assert "of vector memory" in bundle_as_text([call])
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert (manifest["target"], manifest["libtpu"]) == ("tpu:tpu_v5_lite", importlib.metadata.version("libtpu"))


def test_candidates_are_simulated_or_have_the_reason(capfd):
    ways = [Way("loop"), Way("pallas", 128), Way("prefetch"), Way("bfloat16")]
    (found,) = estimate_calls([CALL], Target.named("tpu_v6e"), candidates=lambda inv: ways)
    us = {row.config["name"]: row.us for row in found.rows}
    reasons = {row.config["name"]: row.reason for row in found.rows}
    assert {name for name, time in us.items() if time is not None} == {"xla", "loop", "pallas"}
    # 1 MiB of copies takes 0.64 us
    assert 0.3 < us["xla"] < 3 < 2 * us["loop"]
    assert "scalar prefetch" in reasons["prefetch"]
    assert "killed by SIGABRT" in reasons["bfloat16"]
    assert "Check failed" in reasons["bfloat16"]
    assert "symbolize" not in capfd.readouterr().err


def test_a_call_with_many_examples_is_simulated_for_a_few():
    like = jax.ShapeDtypeStruct((16, 512, 2, 128), jnp.bfloat16)
    attend = jax.jit(functools.partial(flash_attention, causal=True, implementation="pallas_tpu"))
    calls = discover_for(attend, (like,) * 3, {}, platform="tpu")
    (found,) = estimate_calls(calls, Target.named("tpu_v6e"), candidates=lambda inv: [])
    assert found.rows[0].us > 0
    assert found.rows[0].simulated == "1, 2 and 3 of 16 along 'batch'"


def test_the_example_of_the_page_runs(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "tpu.md").read_text(encoding="utf-8")
    example = page.split("## From Python")[1].split("```python\n")[1].split("```")[0]
    example += '    print(estimated.statuses["estimated"])\n'
    (tmp_path / "page.py").write_text(example, encoding="utf-8")
    found = subprocess.run([sys.executable, "page.py"], check=False, cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    *_, compiled, estimated = found.stdout.splitlines()
    assert int(estimated) > 1
    assert compiled == "{'ready': 8}"
