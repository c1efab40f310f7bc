# SPDX-License-Identifier: Apache-2.0
"""The kernel for TPUs: which calls it gets, and what of a call it gets. No TPU runs it here."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as shipped
from tests.kernels.paged_attention_cases import MIXED, batch_of

from ejkernel import compat
from ejkernel.kernels.paged_attention import reference, tpu_ragged
from ejkernel.kernels.paged_attention.common import valid
from ejkernel.modules import PagedAttention


def by_the_shipped_reference(q, kv_pages, lengths, table, offsets, count, *, scale, window, soft_cap, blocks):
    assert all(np.diff(np.asarray(offsets))[: int(count[0])] > 0)
    how = {"sm_scale": scale, "sliding_window": window, "soft_cap": soft_cap}
    out = shipped.ref_ragged_paged_attention(q, kv_pages, lengths, table, offsets, count, **how)
    return jnp.pad(out, ((0, len(q) - len(out)), (0, 0), (0, 0)), constant_values=np.nan)  # it writes no padding


def call_of(args, **options):
    args, options = PagedAttention().prepare(*args, **options)
    own = {name: value for name, value in options.items() if name != "implementation"}
    return args, PagedAttention().describe(*args, **own)


@pytest.mark.slow
def test_the_kernel_gets_the_call_in_its_own_layout(monkeypatch):
    """JAX's reference for its kernel, on what the kernel would get, agrees with ours: heads, order, window, padding."""
    monkeypatch.setattr(compat.kernels, "tpu_ragged_paged_attention", by_the_shipped_reference)
    given = batch_of(((5, 5), (0, 7), (3, 12)), tokens=10)
    args, call = call_of(given, sliding_window=5, logits_soft_cap=3.0)
    out = tpu_ragged._attention(call, valid(call, args), (1, 8))
    expected, _ = jax.jit(lambda args: reference.attention(call, args))(args)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_calls_that_the_kernel_does_not_support_are_refused_with_a_reason():
    implementation = tpu_ragged.TpuRagged()
    _, call = call_of(batch_of(MIXED, head_dim=128, heads=(8, 4), dtype="bfloat16"))
    call = dataclasses.replace(call, platform="tpu", table=(8, 64))
    assert implementation.unsupported(call) is None
    assert implementation.params_fault(call, implementation.heuristic(call)) is None
    for change, reason in (
        ({"platform": "gpu"}, "needs a TPU"),
        ({"cache_dtype": "int8"}, "one dtype, bfloat16 or float32, got bfloat16 and int8"),
        ({"sinks": True}, "sinks: not available"),
        ({"return_lse": True}, "return_lse: not available"),
        ({"q": (8, 8, 64), "pages": (9, 4, 4, 2, 64)}, "head_dim of 128, got 64"),
        ({"q": (8, 6, 128), "pages": (9, 4, 3, 2, 128)}, "cannot tile kv_heads=3"),
        ({"partitioned": True}, "would gather the cache"),
    ):
        assert reason in implementation.unsupported(dataclasses.replace(call, **change))
