# SPDX-License-Identifier: Apache-2.0
"""The published tables of the package, and of JAX: each row is found by the call that it describes, and runs."""

from __future__ import annotations

import dataclasses
import re

import jax
import pytest

from ejkernel.kernels.flash_attention import splash
from ejkernel.kernels.flash_attention.splash import Splash
from ejkernel.kernels.grouped_matmul.megablox import Megablox, MegabloxWgrad
from ejkernel.kernels.paged_attention.tpu_ragged import TpuRagged
from ejkernel.modules import flash_attention
from ejkernel.ops.autotuner.compile.targets import Target, target_names
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import living_kernels, prepared
from ejkernel.ops.execution.discovery import discover_for
from ejkernel.ops.utils.storage.serialize import from_plain

DEVICES = {target.fingerprint for target in map(Target.named, target_names()) if target.platform == "tpu"}


def like(*shape):
    return jax.ShapeDtypeStruct(shape, "bfloat16")


def invocation(op, args, kwargs, device):
    kernel = living_kernels()[f"{op}@v0"][0]
    args, kwargs = prepared(kernel, args, kwargs)
    return dataclasses.replace(Invocation(kernel=kernel, args=args, kwargs=kwargs).abstract(), device=device)


def attention(call):
    query, key = like(2, call["queries"], 8, call["head_dim"]), like(2, call["keys"], 2, call["head_dim"])
    args = (query, key, like(2, call["keys"], 2, call["value_dim"]))
    return invocation("flash_attention", args, {"causal": bool(call["causal"])}, call["device"])


def product(call):
    groups = jax.ShapeDtypeStruct((call["groups"],), "int32")
    args = (like(call["rows"], call["inner"]), like(call["groups"], call["inner"], call["columns"]), groups)
    return invocation("grouped_matmul", args, {}, call["device"])


@pytest.mark.parametrize(("implementation", "call_of"), [(Splash(), attention), (Megablox(), product)])
def test_each_row_is_found_and_runs(implementation, call_of):
    ((_, rows),) = implementation.published.read().items()
    assert len(rows) > 20
    for row in rows:
        inv, backward = call_of(row["call"]), bool(row["call"].get("backward"))
        call = dataclasses.replace(inv.kernel.call_of(inv), backward=backward)
        device = call.device_fingerprint
        found = implementation.published.rows({"device": device, **implementation.published_as(call)})
        assert row["params"] in [each.params for each in found]
        assert implementation.unsupported(call) is None
        params = from_plain(row["params"], implementation.params_type(backward=backward))
        assert implementation.params_fault(call, params) is None
        assert device in DEVICES


def test_a_backward_call_has_a_fused_kernel():
    q = like(1, 1024, 2, 128)
    gradient = jax.jit(jax.grad(lambda q: flash_attention(q, q, q, causal=True).astype("float32").sum()))
    _, backward = discover_for(gradient, (q,), {}, platform="tpu")
    inv = dataclasses.replace(backward, device="tpu:tpu7x")
    found = inv.kernel.published(inv)[0]
    assert (found.config.implementation, found.config.bwd.fused, found.why_not_untuned) == ("splash", True, "")


def test_blocks_that_may_exceed_the_memory_are_left_to_tuning(monkeypatch):
    call = {"device": "tpu:tpu_v5", "queries": 8192, "keys": 8192, "head_dim": 128, "value_dim": 128, "causal": 0}
    inv = attention(call)
    (found,) = inv.kernel.published(inv)
    assert found.why_not == found.why_not_untuned == ""  # more than the compiler allows by default
    monkeypatch.setattr(splash, "untuned_of", lambda call: 16 << 20)
    (found,) = inv.kernel.published(inv)
    assert found.why_not == ""
    assert re.search(r"it may take \d+ bytes of vector memory, and a kernel may take 16777216", found.why_not_untuned)
    assert found.config.fwd in [config.fwd for config in inv.kernel.config_space(inv)]


def test_rows_of_weights_gradients_have_its_facts():
    ((_, rows),) = MegabloxWgrad.published.read().items()
    ((_, others),) = Megablox.published.read().items()
    assert {frozenset(row["call"]) for row in rows} == {frozenset(row["call"]) for row in others}


@pytest.mark.parametrize("device", ["tpu:tpu_v5_lite", "tpu:tpu_v5", "tpu:tpu_v6_lite"])
def test_paged_attention_has_the_blocks_of_jaxs_table(device):
    pages, batch = like(64, 32, 4, 2, 128), 16
    table = jax.ShapeDtypeStruct((batch, 16), "int32")
    offsets, lengths = (jax.ShapeDtypeStruct((n,), "int32") for n in (batch + 1, batch))
    args = (like(512, 8, 128), pages, table, offsets, lengths)
    inv = invocation("paged_attention", args, {}, device)
    (found,) = inv.kernel.published(inv)
    assert found.note == f"published in JAX {jax.__version__}"
    assert found.config.implementation == "tpu_ragged"
    assert found.why_not_untuned.endswith("without a comparison with XLA")


def test_every_row_of_jaxs_table_has_known_parameters():
    ((_, rows),) = TpuRagged.published.read().items()
    assert {row["call"]["device"] for row in rows} <= DEVICES
    assert all(TpuRagged.params(**row["params"]) for row in rows)
