# SPDX-License-Identifier: Apache-2.0
"""Kernels for TPUs, compiled by Google's compiler for TPUs that are not here: `make test-tpu`.

A program for a TPU is only compiled, never run. The compiler reports the vector memory that each kernel takes; our
estimate must not be lower, because it decides which configurations are refused. How far it may be higher is stated
with each test; calls have many examples, because XLA keeps short arrays in vector memory, which makes windows smaller.
"""

from __future__ import annotations

import os
import random
import re

import jax
import pytest

from ejkernel import compat
from ejkernel.kernels._row_norms import pallas as row_norms
from ejkernel.kernels._row_norms.pallas import Pallas
from ejkernel.kernels.flash_attention import splash
from ejkernel.kernels.flash_attention.common import Operands, Rules, describe
from ejkernel.kernels.flash_attention.pallas_tpu import choices, memory
from ejkernel.kernels.flash_attention.pallas_tpu.implementation import PallasTpu
from ejkernel.kernels.grouped_matmul.common import GroupedMatmulCall
from ejkernel.kernels.grouped_matmul.megablox import Megablox, MegabloxWgrad
from ejkernel.kernels.layer_norm.operation import LayerNormCall
from ejkernel.kernels.paged_attention.common import PagedCall
from ejkernel.kernels.paged_attention.tpu_ragged import TpuRagged, vector_memory
from ejkernel.kernels.rms_norm.operation import RmsNormCall
from ejkernel.ops.utils.fingerprint import fingerprint_of

pytest.importorskip("libtpu")
pytestmark = pytest.mark.slow

CHIPS = ("v5e", "v6e")
SAMPLE = int(os.environ.get("TPU_SAMPLE", "4"))  # configurations of each space
EXAMPLES = 16


@pytest.fixture(scope="module", params=CHIPS)
def sharding(request):
    """The first device of a TPU that is not here."""
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # ask no server for what machine this is
    topology = topologies.get_topology_desc(platform="tpu", topology_name=f"{request.param}:2x2")
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def used_memory(function, *args):
    """Return the bytes of vector memory of each kernel in a program compiled for a TPU."""
    text = jax.jit(function).lower(*args).compile().as_text()
    found = []
    for part in text.split('custom_call_target="tpu_custom_call"')[1:]:
        # XLA may keep other arrays below the kernel's scope; what is used counts from 0
        scope = re.search(r'"scoped_memory_configs":\[.*?"offset":"(\d+)"', part)[1]
        used = re.search(r'"used_scoped_memory_configs":\[.*?"size":"(\d+)"', part)[1]
        found.append(int(used) - int(scope))
    assert found, "the program has no kernel"
    return found


def check_estimate(estimate, used, params, *, most):
    """Check that an estimate is not below the bytes used, and at most `most` times as high, with 1 MiB to spare."""
    assert used <= estimate, params
    assert estimate <= most * used + 2**20, params


def sampled(space, seed, most=SAMPLE):
    space = list(space)
    return random.Random(seed).sample(space, min(most, len(space)))


ATTENTION = {
    "causal": {"rules": Rules(scale=0.1, right=0)},
    "full, D64": {"head_dim": 64, "rules": Rules(scale=0.1)},
    "window, cap, segments": {"segments": True, "rules": Rules(scale=0.1, left=1000, right=0, soft_cap=20.0)},
    "D256, odd length": {"head_dim": 256, "length": 3001, "rules": Rules(scale=0.1)},
    "float32": {"dtype": "float32", "rules": Rules(scale=0.1, right=0)},
}


def attention_operands(sharding, *, length=4096, head_dim=128, value_dim=None, dtype="bfloat16", segments=False, **_):
    def like(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    ids = like(EXAMPLES, length, dtype="int32") if segments else None
    query, key = like(EXAMPLES, length, 8, head_dim), like(EXAMPLES, length, 4, head_dim)
    value = like(EXAMPLES, length, 4, value_dim or head_dim)
    residuals = like(EXAMPLES, length, 8, value_dim or head_dim), like(EXAMPLES, 8, length, dtype="float32")
    return Operands(query, key, value, query_segments=ids, key_segments=ids), residuals


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("case", ATTENTION)
def test_splash_compiles_within_the_estimate(sharding, case, backward):
    rules = ATTENTION[case]["rules"]
    operands, (out, lse) = attention_operands(sharding, **ATTENTION[case])
    implementation = splash.Splash()
    call = describe(operands, rules, platform="tpu", backward=backward)
    assert implementation.unsupported(call) is None
    for params in [implementation.heuristic(call), *sampled(implementation.space(call), case)]:
        if backward:
            used = used_memory(
                lambda o, out, lse, dout, params=params: implementation.differentiate(
                    o, (out, lse), dout, rules, params
                ),
                *(operands, out, lse, out),
            )
        else:
            used = used_memory(lambda o, params=params: implementation.attend(o, rules, params), operands)
        # in float32, with ids or with a cap the compiler's intermediates vary more
        check_estimate(splash.vector_memory(call, params), max(used), params, most=1.5 if case == "causal" else 2.5)


OWN = ATTENTION | {
    "window of two sides": {"rules": Rules(scale=0.1, left=700, right=300)},
    "unequal dims": {"head_dim": 192, "value_dim": 128, "rules": Rules(scale=0.1, right=0)},
    "65,536 keys": {"length": 65_536, "rules": Rules(scale=0.1, right=0)},
}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("case", OWN)
def test_our_attention_compiles_within_the_estimate(sharding, case, backward, monkeypatch):
    """Each kernel's estimate, with a margin, is passed to the compiler as its limit."""
    rules, limits, estimated = OWN[case]["rules"], [], memory.limit
    monkeypatch.setattr(memory, "limit", lambda need: limits.append(need) or estimated(need))
    operands, (out, lse) = attention_operands(sharding, **OWN[case])
    implementation = PallasTpu()
    (device,) = sharding.device_set
    chip = fingerprint_of("tpu", device.device_kind)
    call = describe(operands, rules, platform="tpu", fingerprint=chip, backward=backward)
    assert implementation.unsupported(call) is None
    # these kernels are long programs, which take the compiler up to half a minute
    for params in [implementation.heuristic(call), *sampled(implementation.space(call), case, SAMPLE // 4)]:
        limits.clear()
        if backward:
            used = used_memory(
                lambda o, out, lse, dout, params=params: implementation.differentiate(
                    o, (out, lse), dout, rules, params
                ),
                *(operands, out, lse, out),
            )
        else:
            used = used_memory(lambda o, params=params: implementation.attend(o, rules, params), operands)
        assert memory.Need(*map(max, zip(*limits, strict=True))) == choices.needed(call, params)
        assert len(used) == len(limits)
        for size, need in zip(sorted(used), sorted(limits), strict=True):
            assert need.least <= size, params
            check_estimate(need.most, size, params, most=2)


PRODUCTS = {
    "8 groups": {"rows": 4096, "inner": 4096, "columns": 4096, "groups": 8},
    "odd sizes": {"rows": 3000, "inner": 1000, "columns": 1500, "groups": 7},
    "float32": {"rows": 2048, "inner": 2048, "columns": 2048, "groups": 4, "dtype": "float32", "out_dtype": "float32"},
}


@pytest.mark.parametrize("implementation", [Megablox(), MegabloxWgrad()], ids=["product", "weights"])
@pytest.mark.parametrize("case", PRODUCTS)
def test_megablox_compiles_within_the_estimate(sharding, case, implementation):
    sizes = {"dtype": "bfloat16", "out_dtype": "bfloat16", **PRODUCTS[case]}
    call = GroupedMatmulCall(**sizes, platform="tpu", device_fingerprint="tpu:v5")

    def like(*shape, dtype=call.dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    rhs = (
        like(call.rows, call.columns)
        if isinstance(implementation, MegabloxWgrad)
        else like(call.groups, call.inner, call.columns)
    )
    args = (like(call.rows, call.inner), rhs, like(call.groups, dtype="int32"))
    for params in [implementation.heuristic(call), *sampled(implementation.space(call), case)]:
        used = used_memory(lambda *args, params=params: implementation.forward(call, *args, params=params)[0], *args)
        # XLA keeps the short operands of the odd sizes in vector memory
        check_estimate(implementation.memory(call, params), max(used), params, most=2 if case == "odd sizes" else 1.5)


def published(implementation):
    (rows,) = implementation.published.read().values()
    # the gradients of longer calls need more memory than a chip has
    return sampled([row for row in rows if row["call"].get("queries", 0) <= 16_384], implementation.name)


def test_published_blocks_of_attention_compile_within_the_estimate(sharding):
    implementation = splash.Splash()
    for row in published(implementation):
        facts, backward = row["call"], bool(row["call"]["backward"])
        rules = Rules(scale=0.1, right=0 if facts["causal"] else None)
        assert facts["queries"] == facts["keys"]
        sizes = {"length": facts["queries"], "head_dim": facts["head_dim"], "value_dim": facts["value_dim"]}
        operands, (out, lse) = attention_operands(sharding, **sizes)
        call = describe(operands, rules, platform="tpu", fingerprint=facts["device"], backward=backward)
        params = implementation.params_type(backward=backward)(**row["params"])
        if backward:
            used = used_memory(
                lambda o, out, lse, dout, rules=rules, params=params: implementation.differentiate(
                    o, (out, lse), dout, rules, params
                ),
                *(operands, out, lse, out),
            )
        else:
            used = used_memory(lambda o, rules=rules, params=params: implementation.attend(o, rules, params), operands)
        assert max(used) <= splash.vector_memory(call, params), (facts, params)


@pytest.mark.parametrize("implementation", [Megablox(), MegabloxWgrad()], ids=["product", "weights"])
def test_published_tiles_of_groups_compile_within_the_estimate(sharding, implementation):
    for row in published(implementation):
        facts = {name: size for name, size in row["call"].items() if name != "device"}
        call = GroupedMatmulCall(**facts, dtype="bfloat16", out_dtype="bfloat16", platform="tpu")

        def like(*shape, dtype="bfloat16"):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        rhs = (
            like(call.rows, call.columns)
            if isinstance(implementation, MegabloxWgrad)
            else like(call.groups, call.inner, call.columns)
        )
        args = (like(call.rows, call.inner), rhs, like(call.groups, dtype="int32"))
        params = implementation.params(**row["params"])
        used = used_memory(
            lambda *args, call=call, params=params: implementation.forward(call, *args, params=params)[0], *args
        )
        assert max(used) <= implementation.memory(call, params), (row["call"], params)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("operation", ["rms_norm", "layer_norm"])
def test_row_norms_compile_within_the_estimate(sharding, operation, backward):
    implementation, call_type = Pallas(), RmsNormCall if operation == "rms_norm" else LayerNormCall
    dim, residual = 4096, operation == "layer_norm"
    call = call_type(
        rows=16_001, dim=dim, dtype="bfloat16", eps=1e-6, residual=residual, platform="tpu", backward=backward
    )

    def like(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    x, vector, column = like(call.rows, dim), like(dim), like(call.rows, dtype="float32")
    args = (x, vector) if operation == "rms_norm" else (x, vector, vector, x)
    stats, out = (column, (x,)) if operation == "rms_norm" else ((column, column), (x, x))
    for params in [implementation.heuristic(call), *sampled(implementation.space(call), operation)]:
        if backward:
            used = used_memory(
                lambda stats, out, *args, params=params: implementation.backward(
                    call, stats, out, out, *args, params=params
                ),
                *(stats, out, *args),
            )
        else:
            used = used_memory(
                lambda *args, params=params: implementation.forward(call, *args, params=params)[0], *args
            )
        check_estimate(row_norms.memory(call, params), max(used), params, most=2)


PAGED = {
    "decode": {"q": (64, 32, 128), "pages": (4096, 16, 8, 2, 128), "table": (64, 256)},
    "prefill": {"q": (2048, 16, 128), "pages": (512, 64, 4, 2, 128), "table": (8, 32), "window": 99, "soft_cap": 9.0},
    "one head": {"q": (100, 8, 128), "pages": (512, 16, 1, 2, 128), "table": (16, 32)},
    "float32": {"q": (64, 16, 128), "pages": (512, 64, 4, 2, 128), "table": (16, 32), "dtype": "float32"},
}


@pytest.mark.parametrize("case", PAGED)
def test_ragged_paged_attention_compiles_within_the_estimate(sharding, case):
    shape = {"dtype": "bfloat16", **PAGED[case]}
    call = PagedCall(**shape, cache_dtype=shape["dtype"], scale=0.1, platform="tpu")
    implementation = TpuRagged()
    assert implementation.unsupported(call) is None

    def like(*shape, dtype="int32"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    (sequences, _), own = call.table, {"dtype": call.dtype}
    args = (like(*call.q, **own), like(*call.pages, **own), like(*call.table), like(sequences + 1), like(sequences))
    (device,) = sharding.device_set
    for params in [implementation.heuristic(call), *sampled(implementation.space(call), case)]:
        with compat.abstract_device("tpu", device.device_kind, 1):
            used = used_memory(
                lambda *args, params=params: implementation.forward(call, *args, *[None] * 4, params=params)[0], *args
            )
        assert max(used) <= vector_memory(call, params), params
