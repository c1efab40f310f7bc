# SPDX-License-Identifier: Apache-2.0
"""The vector memory of kernels for TPUs, with a known chip, an unknown one, or before it matters."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import pytest
from benchmarks import heuristics_tpu

from ejkernel.kernels import _vector_memory
from ejkernel.kernels._alike import Alike
from ejkernel.kernels._vector_memory import Need, Parts, limit_of, memory_of, untuned_of
from ejkernel.kernels.flash_attention import _splash_weights
from ejkernel.kernels.flash_attention.common import Operands, Rules, describe
from ejkernel.kernels.flash_attention.pallas_tpu import spilled
from ejkernel.kernels.flash_attention.pallas_tpu.implementation import PallasTpu
from ejkernel.kernels.flash_attention.splash import Splash
from ejkernel.kernels.rms_norm.operation import RmsNormCall

CALL = RmsNormCall(rows=1024, dim=4096, dtype="bfloat16", eps=1e-6, platform="tpu", device_fingerprint="tpu:tpu_v5")
UNKNOWN = dataclasses.replace(CALL, device_fingerprint="")
TRACED = dataclasses.replace(UNKNOWN, platform=None)
MIB = 1 << 20


@pytest.mark.parametrize(
    ("call", "most", "surely"),
    [(CALL, 64, 64), (UNKNOWN, 128, 16), (TRACED, 128, 128)],
    ids=["v5p", "unknown", "traced"],
)
def test_an_unknown_chip_is_the_largest_for_refusals_and_the_smallest_for_untuned_calls(call, most, surely):
    assert memory_of(call) == most * MIB
    assert memory_of(call, surely=True) == surely * MIB
    assert untuned_of(call) == surely * MIB * 27 // 32
    assert limit_of(call) == (16 if call is CALL else 32) * MIB


def test_the_message_says_which_chip_and_how_to_name_it():
    need = Need(40 * MIB, 80 * MIB)
    assert need.fault(16 * MIB, CALL).endswith("a kernel may take 16777216 on this chip.")
    assert need.fault(16 * MIB, UNKNOWN).endswith("a kernel may take 16777216 on any TPU.")
    assert need.doubt(64 * MIB, CALL).endswith("a kernel may take 67108864 on this chip.")
    assert "on every TPU. The chip is unknown; to name it, lower the program" in need.doubt(64 * MIB, UNKNOWN)
    assert need.fault(40 * MIB, CALL) is need.doubt(80 * MIB, UNKNOWN) is None


@pytest.mark.parametrize(
    ("form", "loop", "registers"),
    [
        ("straight", "", 10),
        ("straight", "small loop", 10),
        ("straight", "large loop", 24),
        ("other", "large loop", None),
        ("other", "small loop", 7),
        ("straight", "other", None),
        ("", "", None),
    ],
)
def test_registers_of_code_that_runs_one_after_the_other_are_shared(monkeypatch, form, loop, registers):
    code = {"straight": [10, 4], "small loop": [5], "large loop": [20], "other with small loop": [7]}
    monkeypatch.setattr(_vector_memory, "compiled", lambda: code)
    assert Parts(0, 0, "kind", {}, form, loop).registers == registers


@pytest.mark.parametrize(
    ("form", "loop", "weight", "most"),
    [
        ("known", "", 1.0, 1040),
        ("known", "known loop", 1.0, 1040 + int(30 * 4096 * 1.04)),
        ("known", "like", 1.0, int((1000 + 4096 * 50) * 1.2)),
        ("like", "", 1.0, int((1000 + 4096 * 50) * 1.2)),
        ("like", "like", 1.0, int((1000 + 4096 * 50) * 1.2)),
        ("like", "", 0.1, 1000 + 40_000),
        ("none", "", 1.0, 1000 + 400_000),
        ("known", "none", 1.0, 1000 + 400_000),
    ],
)
def test_code_alike_counts_where_the_table_lacks_code_unless_the_weights_give_less(
    monkeypatch, form, loop, weight, most
):
    code = {"known": [0, 0], "known loop": [30]}
    alike = {"like": Alike((50.0, 0.0), 1.2)}
    monkeypatch.setattr(_vector_memory, "compiled", lambda: code)
    monkeypatch.setattr(_vector_memory, "_likeness", lambda: alike.get)
    parts = Parts(10, 1000, "kind", {"size": 100_000}, form, loop)
    assert parts.need({"kind": {"size": weight}}) == Need(10, pytest.approx(most, abs=1))


def test_no_untuned_attention_of_a_v4_takes_more_than_the_estimate():
    file = Path(heuristics_tpu.__file__).parent / "results/heuristics_tpu.json"
    results = [one for one in json.loads(file.read_text())["results"] if one["chip"] == "v4" and one.get("used")]
    assert len(results) > 70
    for one in results:
        weights = _splash_weights.WEIGHTS if one["implementation"] == "splash" else spilled.WEIGHTS
        assert max(one["used"]) <= max(parts.need(weights).most for parts in heuristics_tpu.parts_of(one)), one


def lowered(implementation, query, mapped=()):
    """Return the program of a forward call for TPUs, under `vmap` over axes of these sizes."""
    operands, rules = Operands(query, query, query), Rules(scale=0.1, right=0)
    params = implementation.heuristic(describe(operands, rules, platform="tpu", fingerprint="tpu:tpu_v5"))

    def run(given):
        return implementation.attend(given, rules, params)

    for size in mapped:
        run = jax.vmap(run)
        operands = jax.tree.map(lambda x, size=size: jax.ShapeDtypeStruct((size, *x.shape), x.dtype), operands)
    return jax.jit(run).trace(operands).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.slow
@pytest.mark.parametrize("length", [1024, 4096])
@pytest.mark.parametrize("implementation", [PallasTpu(), Splash()], ids=["pallas_tpu", "splash"])
def test_the_operands_and_results_of_long_calls_are_in_hbm(implementation, length):
    """XLA would keep some of them in vector memory, where a kernel has no windows for them."""
    text = lowered(implementation, jax.ShapeDtypeStruct((1, length, 4, 128), "bfloat16"))
    for arrays in ("input", "output"):
        assert (f"{arrays}_memory_space_colors" in text) is (length == 4096)


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [(1,), (2, 1)], ids=str)
@pytest.mark.parametrize("implementation", [PallasTpu(), Splash()], ids=["pallas_tpu", "splash"])
def test_a_long_call_under_vmap_is_one_kernel_with_arrays_in_hbm(implementation, mapped):
    """JAX squeezes an axis of one example, which it cannot for an array with the type of HBM."""
    text = lowered(implementation, jax.ShapeDtypeStruct((1, 4096, 4, 128), "bfloat16"), mapped)
    assert text.count("input_memory_space_colors") == text.count("@tpu_custom_call") == 1
