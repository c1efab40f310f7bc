# SPDX-License-Identifier: Apache-2.0
"""Kernels for TPUs, compiled by Google's compiler without a TPU: `make test-tpu`.

A program for a TPU is only compiled, never run. The compiler reports the vector memory that each kernel takes. Our
lower estimate must not be above this figure, because it decides which configurations are refused. The upper estimate
must not be below it, because it decides the configurations of untuned calls; each test states how far it may be above.
XLA may keep short arrays in vector memory; a kernel has no windows for them. `benchmarks.tpu_windows` adds these
windows for attention. Arrays of other kernels are long.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random

import jax
import pytest
from benchmarks import tpu_windows

from ejkernel import compat
from ejkernel.kernels._row_norms import pallas as row_norms
from ejkernel.kernels._row_norms.pallas import Pallas
from ejkernel.kernels._vector_memory import larger, limit_of
from ejkernel.kernels.flash_attention import _splash_memory, splash
from ejkernel.kernels.flash_attention.common import Operands, Rules, describe
from ejkernel.kernels.flash_attention.pallas_tpu import choices, launch
from ejkernel.kernels.flash_attention.pallas_tpu.implementation import PallasTpu
from ejkernel.kernels.flash_attention.pallas_tpu.params import ForwardParams
from ejkernel.kernels.grouped_matmul.common import GroupedMatmulCall
from ejkernel.kernels.grouped_matmul.megablox import Megablox, MegabloxWgrad
from ejkernel.kernels.layer_norm.operation import LayerNormCall
from ejkernel.kernels.paged_attention import tpu_ragged
from ejkernel.kernels.paged_attention.common import PagedCall
from ejkernel.kernels.paged_attention.tpu_ragged import TpuRagged
from ejkernel.kernels.rms_norm.operation import RmsNormCall
from ejkernel.modules import FlashAttentionConfig, flash_attention
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils.fingerprint import fingerprint_of

pytest.importorskip("libtpu")
pytestmark = pytest.mark.slow

CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
SAMPLE = int(os.environ.get("TPU_SAMPLE", "4"))  # configurations of each space
LEAST = 160 << 20  # bytes of an array; a chip has 128 MiB of vector memory at most


@pytest.fixture(scope="module", params=CHIPS)
def sharding(request):
    """The first device of a TPU that is not here."""
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # ask no server for the type of this machine
    topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[request.param])
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def used_memory(function, *args):
    """Return the bytes of vector memory of each kernel in a program compiled for a TPU."""
    found = compat.executables.vector_memory(jax.jit(function).lower(*args).compile().as_text())
    assert found, "the program has no kernel"
    return found


def attention_memory(implementation, call, operands, params):
    """Return the bytes of vector memory of each kernel with the windows of all its arrays."""
    return [one.used + one.kept for one in tpu_windows.of_attention(implementation, call, operands, params)]


def check_estimate(need, used, params, *, most):
    """Check that the estimates enclose the bytes used; the upper one is at most `most` times as high, and 1 MiB."""
    assert need.least <= used <= need.most, params
    assert need.most <= most * used + 2**20, params


def sampled(implementation, call, seed, most=SAMPLE):
    """Return the heuristic's parameters and some of the space that surely fit."""
    space = [params for params in implementation.space(call) if implementation.doubt(call, params) is None]
    return [implementation.heuristic(call), *random.Random(seed).sample(space, min(most, len(space)))]


def all_listed(found):
    return all(parts.registers is not None for parts in found)


def vector_memory_of(call, params):
    return _splash_memory.vector_memory(call, splash.blocks_of(params))


def chip_of(sharding):
    (device,) = sharding.device_set
    return fingerprint_of("tpu", device.device_kind)


def test_the_limit_of_a_kernel_is_the_compilers(sharding):
    implementation = Pallas()
    call = RmsNormCall(
        rows=2**15, dim=4096, dtype="bfloat16", eps=1e-6, platform="tpu", device_fingerprint=chip_of(sharding)
    )
    args = (
        jax.ShapeDtypeStruct(shape, "bfloat16", sharding=sharding) for shape in ((call.rows, call.dim), (call.dim,))
    )
    too_many = row_norms.PallasParams(block_rows=limit_of(call) >> 14)  # less than the chip has
    assert f"a kernel may take {limit_of(call)} on" in implementation.params_fault(call, too_many)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"limit {limit_of(call) >> 20}.00M"):
        used_memory(lambda *args: implementation.forward(call, *args, params=too_many)[0], *args)


def test_a_program_lowered_for_a_device_of_a_topology_is_for_its_chip(sharding):
    x = jax.ShapeDtypeStruct((1, 16_384, 1, 256), "bfloat16", sharding=sharding)

    def lowered(block):
        params = splash.SplashParams(block_q=block, block_kv=block, block_kv_compute=512)
        config = FlashAttentionConfig(implementation="splash", fwd=params)
        return jax.jit(lambda *args: flash_attention(*args, causal=True, cfg=config)).lower(x, x, x)

    assert lowered(4096)
    if chip_of(sharding) == "tpu:tpu_v5":
        with pytest.raises(ConfigError, match="a kernel may take 67108864 on this chip"):
            lowered(16_384)
    else:
        assert lowered(8192)


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

    value_dim = value_dim or head_dim
    examples = math.ceil(LEAST / (length * 4 * min(head_dim, value_dim) * (4 if dtype == "float32" else 2)))
    ids = like(examples, length, dtype="int32") if segments else None
    query, key, value = (
        like(examples, length, heads, dim) for heads, dim in ((8, head_dim), (4, head_dim), (4, value_dim))
    )
    return Operands(query, key, value, query_segments=ids, key_segments=ids)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("case", ATTENTION)
def test_splash_compiles_within_the_estimate(sharding, case, backward):
    rules = ATTENTION[case]["rules"]
    operands = attention_operands(sharding, **ATTENTION[case])
    implementation = splash.Splash()
    call = describe(operands, rules, platform="tpu", fingerprint=chip_of(sharding), backward=backward)
    assert implementation.unsupported(call) is None
    for params in sampled(implementation, call, case):
        used = attention_memory(implementation, call, operands, params)
        # in float32, with ids or with a cap the compiler's intermediates vary more
        need = vector_memory_of(call, params)
        check_estimate(need, max(used), params, most=1.5 if case == "causal" else 2.5)
        found = [_splash_memory.parts_of(call, *one) for one in splash.blocks_of(params).items()]
        assert need.most <= 1.1 * max(used) or not all_listed(found), params


OWN = ATTENTION | {
    "window of two sides": {"rules": Rules(scale=0.1, left=700, right=300)},
    "unequal dims": {"head_dim": 192, "value_dim": 128, "rules": Rules(scale=0.1, right=0)},
    "65,536 keys": {"length": 65_536, "rules": Rules(scale=0.1, right=0)},
}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("case", OWN)
def test_our_attention_compiles_within_the_estimate(sharding, case, backward, monkeypatch):
    """Each estimate, with a margin, is passed to the compiler as its limit; those of common calls are close."""
    rules, limits, passed = OWN[case]["rules"], [], launch.memory_to_pass
    monkeypatch.setattr(launch, "memory_to_pass", lambda need, arrays: limits.append(need) or passed(need, arrays))
    operands = attention_operands(sharding, **OWN[case])
    implementation = PallasTpu()
    call = describe(operands, rules, platform="tpu", fingerprint=chip_of(sharding), backward=backward)
    assert implementation.unsupported(call) is None
    # these kernels are long programs, which take the compiler up to half a minute
    for params in sampled(implementation, call, case, SAMPLE // 4):
        limits.clear()
        used = attention_memory(implementation, call, operands, params)
        assert len(used) == len(limits)
        assert larger(*limits) == choices.needed(dataclasses.replace(call, device_fingerprint=""), params)
        for size, need in zip(sorted(used), sorted(limits), strict=True):
            check_estimate(need, size, params, most=2)
        need = choices.needed(call, params)
        check_estimate(need, max(used), params, most=2)
        # loops and other code may have been compiled in kernels with other masks, which keep a little more
        assert need.most <= 1.15 * max(used) or not all_listed(choices.parts_of(call, params)), params


@pytest.mark.parametrize("length", [1024, 4096])
@pytest.mark.parametrize("implementation", [PallasTpu(), splash.Splash()], ids=["pallas_tpu", "splash"])
def test_xla_keeps_only_short_arrays_in_vector_memory(sharding, implementation, length):
    """XLA keeps short arrays there, and a kernel has no windows for them; the rest of the kernel takes the same."""
    query, key = (jax.ShapeDtypeStruct((2, length, heads, 128), "bfloat16", sharding=sharding) for heads in (4, 1))
    operands = Operands(query, key, key)
    call = describe(operands, Rules(scale=0.1, right=0), platform="tpu", fingerprint=chip_of(sharding))
    params = implementation.heuristic(call)
    (found,) = tpu_windows.of_attention(implementation, call, operands, params)
    need = choices.needed if isinstance(params, ForwardParams) else vector_memory_of
    assert (found.kept > 0) is (length == 1024)
    assert found.used <= need(call, params).most - found.kept
    assert length == 1024 or need(call, params).most <= 1.05 * found.used


PRODUCTS = {
    "8 groups": {"rows": 4096, "inner": 4096, "columns": 4096, "groups": 8},
    "odd sizes": {"rows": 90_001, "inner": 1001, "columns": 1501, "groups": 67},
    "float32": {"rows": 2048, "inner": 2048, "columns": 2048, "groups": 4, "dtype": "float32", "out_dtype": "float32"},
}


@pytest.mark.parametrize("implementation", [Megablox(), MegabloxWgrad()], ids=["product", "weights"])
@pytest.mark.parametrize("case", PRODUCTS)
def test_megablox_compiles_within_the_estimate(sharding, case, implementation):
    sizes = {"dtype": "bfloat16", "out_dtype": "bfloat16", **PRODUCTS[case]}
    call = GroupedMatmulCall(**sizes, platform="tpu", device_fingerprint=chip_of(sharding))

    def like(*shape, dtype=call.dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    rhs = (
        like(call.rows, call.columns)
        if isinstance(implementation, MegabloxWgrad)
        else like(call.groups, call.inner, call.columns)
    )
    args = (like(call.rows, call.inner), rhs, like(call.groups, dtype="int32"))
    for params in sampled(implementation, call, case):
        used = used_memory(lambda *args, params=params: implementation.forward(call, *args, params=params)[0], *args)
        check_estimate(implementation.memory(call, params), max(used), params, most=1.5)


def published(implementation, call_of):
    """Return published parameters, with facts and call, that surely fit in the vector memory of the call's chip."""
    (rows,) = implementation.published.read().values()
    found = []
    for row in rows:
        facts, call = row["call"], call_of(row["call"])
        params = implementation.params_type(backward=call.backward)(**row["params"])
        # longer calls, or more matrices, need more memory than a chip has
        is_small = facts.get("queries", 0) <= 16_384 and facts.get("groups", 0) <= 128
        if is_small and implementation.doubt(call, params) is None:
            found.append((facts, call, params))
    return random.Random(implementation.name).sample(found, min(SAMPLE, len(found)))


def test_published_blocks_of_attention_compile_within_the_estimate(sharding):
    implementation = splash.Splash()

    def given(facts):
        assert facts["queries"] == facts["keys"]
        sizes = {"length": facts["queries"], "head_dim": facts["head_dim"], "value_dim": facts["value_dim"]}
        return attention_operands(sharding, **sizes)

    def call_of(facts):
        rules, backward = Rules(scale=0.1, right=0 if facts["causal"] else None), bool(facts["backward"])
        return describe(given(facts), rules, platform="tpu", fingerprint=chip_of(sharding), backward=backward)

    for facts, call, params in published(implementation, call_of):
        operands = given(facts)
        used = attention_memory(implementation, call, operands, params)
        assert max(used) <= vector_memory_of(call, params).most, (facts, params)


@pytest.mark.parametrize("implementation", [Megablox(), MegabloxWgrad()], ids=["product", "weights"])
def test_published_tiles_of_groups_compile_within_the_estimate(sharding, implementation):
    def like(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def call_of(facts):
        place = {"platform": "tpu", "device_fingerprint": chip_of(sharding)}
        sizes = {name: size for name, size in facts.items() if name != "device"}
        return GroupedMatmulCall(**sizes, dtype="bfloat16", out_dtype="bfloat16", **place)

    for facts, call, params in published(implementation, call_of):
        rhs = (
            like(call.rows, call.columns)
            if isinstance(implementation, MegabloxWgrad)
            else like(call.groups, call.inner, call.columns)
        )
        args = (like(call.rows, call.inner), rhs, like(call.groups, dtype="int32"))
        used = used_memory(
            lambda *args, call=call, params=params: implementation.forward(call, *args, params=params)[0], *args
        )
        assert max(used) <= implementation.memory(call, params).most, (facts, params)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("operation", ["rms_norm", "layer_norm"])
def test_row_norms_compile_within_the_estimate(sharding, operation, backward):
    implementation, call_type = Pallas(), RmsNormCall if operation == "rms_norm" else LayerNormCall
    dim, residual = 4096, operation == "layer_norm"
    sizes = {"rows": 20_001, "dim": dim, "dtype": "bfloat16", "eps": 1e-6, "residual": residual}
    call = call_type(**sizes, platform="tpu", device_fingerprint=chip_of(sharding), backward=backward)

    def like(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    x, vector, column = like(call.rows, dim), like(dim), like(call.rows, dtype="float32")
    args = (x, vector) if operation == "rms_norm" else (x, vector, vector, x)
    stats, out = (column, (x,)) if operation == "rms_norm" else ((column, column), (x, x))
    for params in sampled(implementation, call, operation):
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
    place = {"platform": "tpu", "device_fingerprint": chip_of(sharding)}
    call = PagedCall(**shape, cache_dtype=shape["dtype"], scale=0.1, **place)
    implementation = TpuRagged()
    assert implementation.unsupported(call) is None

    def like(*shape, dtype="int32"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    (sequences, _), own = call.table, {"dtype": call.dtype}
    args = (like(*call.q, **own), like(*call.pages, **own), like(*call.table), like(sequences + 1), like(sequences))
    (device,) = sharding.device_set
    for params in sampled(implementation, call, case):
        with compat.executables.abstract_device("tpu", device.device_kind, 1):
            used = used_memory(
                lambda *args, params=params: implementation.forward(call, *args, *[None] * 4, params=params)[0], *args
            )
        need = tpu_ragged.memory(call, params)
        assert need.least <= max(used) <= need.most, params
