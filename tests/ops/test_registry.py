# SPDX-License-Identifier: Apache-2.0
"""Recorded calls: signatures alone, by device, operation and key; and the block that records."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.ops.sample_kernels import Double

from ejkernel import ops
from ejkernel.ops import Invocation
from ejkernel.ops.errors import UnstableKeyError
from ejkernel.ops.registry import clear_invocations, get_invocations, record_invocation, recording

X = np.arange(4.0, dtype=np.float32)


@pytest.fixture
def kernel():
    return Double()


def arrays_in(invocations):
    return [leaf for leaf in jax.tree.leaves(invocations) if isinstance(leaf, jax.Array | np.ndarray)]


def test_a_call_is_kept_by_device_operation_and_key(kernel):
    inv = Invocation(kernel=kernel, args=(X,))
    record_invocation(kernel, inv)
    expected = {inv.device_fingerprint: {"Double@v0": {inv.call_key: (kernel, inv.abstract_args, {})}}}
    assert get_invocations() == expected


def test_one_device_has_its_shard(kernel):
    record_invocation(kernel, Invocation(kernel=kernel, args=(X,)))
    assert get_invocations(ops.device_fingerprint()) == get_invocations()[ops.device_fingerprint()]


def test_an_unknown_device_has_no_calls(kernel):
    record_invocation(kernel, Invocation(kernel=kernel, args=(X,)))
    assert get_invocations("gpu:none") == {}


def test_no_array_is_kept(kernel):
    record_invocation(kernel, Invocation(kernel=kernel, args=(jnp.asarray(X),), kwargs={"note": X}))
    assert arrays_in(get_invocations()) == []


def test_no_tracer_is_kept(kernel):
    with recording() as seen:
        jax.jit(jax.vmap(jax.grad(lambda x: kernel(x).sum()))).lower(np.ones((2, 4), np.float32))
    leaves = jax.tree.leaves([(inv.args, inv.kwargs, inv.array_types) for inv in seen])
    assert {type(leaf) for leaf in leaves} == {jax.ShapeDtypeStruct}


def test_the_same_call_again_replaces_the_first(kernel):
    for _ in range(2):
        record_invocation(kernel, Invocation(kernel=kernel, args=(X,)))
    assert [len(calls) for calls in get_invocations(ops.device_fingerprint()).values()] == [1]


def test_a_call_without_a_key_is_not_recorded(kernel):
    inv = Invocation(kernel=kernel, args=(X,), kwargs={"note": lambda: 0})
    with pytest.raises(UnstableKeyError):
        record_invocation(kernel, inv)


def test_the_returned_mapping_is_a_copy(kernel):
    record_invocation(kernel, Invocation(kernel=kernel, args=(X,)))
    get_invocations().clear()
    assert get_invocations() != {}


def test_clearing_forgets(kernel):
    record_invocation(kernel, Invocation(kernel=kernel, args=(X,)))
    clear_invocations()
    assert get_invocations() == {}


def test_nothing_is_recorded_by_default(kernel):
    kernel(X)
    assert get_invocations() == {}


def test_a_block_records_forward_and_backward(kernel):
    with recording() as seen:
        jax.grad(lambda x: kernel(x).sum())(X)
    assert [(inv.op_id, inv.direction) for inv in seen] == [("Double", "fwd"), ("Double.bwd", "bwd")]


def test_a_block_records_a_compiled_function(kernel):
    compiled = jax.jit(kernel)
    compiled(X)
    with recording() as seen:
        compiled(X)
    assert [inv.op_id for inv in seen] == ["Double"]


def test_a_block_records_an_eager_call_that_has_run_before(kernel):
    kernel(X)
    with recording() as seen:
        kernel(X)
    assert [inv.op_id for inv in seen] == ["Double"]


def test_each_block_records_separately(kernel):
    counts = []
    for _ in range(2):
        with recording() as seen:
            kernel(X)
        counts.append(len(seen))
    assert counts == [1, 1]


def test_every_enclosing_block_records(kernel):
    with recording() as outer:
        with recording() as inner:
            kernel(X)
        assert (len(outer), len(inner)) == (1, 1)


def test_a_block_records_nothing_after_an_error(kernel):
    with pytest.raises(ZeroDivisionError), recording() as seen:
        1 / 0  # noqa: B018
    kernel(X)
    assert (seen, get_invocations()) == ([], {})


def test_another_thread_is_not_recorded(kernel):
    with recording() as seen:
        thread = threading.Thread(target=kernel, args=(X,))
        thread.start()
        thread.join()
    assert seen == []


def test_the_environment_turns_recording_on(kernel, monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    kernel(X)
    assert list(get_invocations(ops.device_fingerprint())) == ["Double@v0"]


def test_a_recorded_call_of_another_kernel_is_that_kernels(kernel):
    other = Double()
    record_invocation(other, Invocation(kernel=kernel, args=(X,)))
    (recorded,) = get_invocations(ops.device_fingerprint())["Double@v0"].values()
    assert recorded[0] is other is recorded.invocation.kernel
