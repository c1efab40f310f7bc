# SPDX-License-Identifier: Apache-2.0
"""Kernels over batches and devices, with one configuration for all of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import ops
from ejkernel.ops import ConfigSelectorChain, Executor, Kernel, pmap_with_config, vmap_with_config

A = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
B = np.ones((4, 5), np.float32)


class Matmul(Kernel[int, jax.Array]):
    """`cfg * (a @ b)`, so that a result tells its configuration."""

    def run(self, a, b, *, cfg, scale=1.0, axis=None):
        out = cfg * scale * (a @ b)
        return jax.lax.psum(out, axis) if axis else out

    def heuristic_cfg(self, inv):
        return 1


@pytest.fixture
def kernel():
    return Matmul()


def test_a_batch_is_one_call(kernel):
    with ops.recording() as seen:
        vmap_with_config(kernel, in_axes=(0, None))(A, B)
    assert [(inv.batch_sizes, inv.batch_axes) for inv in seen] == [((2,), ((0, None),))]


def test_a_batch_agrees_with_vmap(kernel):
    got = vmap_with_config(kernel, in_axes=(1, None), out_axes=1)(A, B)
    np.testing.assert_array_equal(got, jax.vmap(jnp.matmul, in_axes=(1, None), out_axes=1)(A, B))


def test_every_argument_is_batched_by_default(kernel):
    got = vmap_with_config(kernel)(A, np.stack([B, B]))
    np.testing.assert_array_equal(got, A @ B)


def test_keywords_are_not_batched(kernel):
    got = vmap_with_config(kernel, in_axes=(0, None))(A, B, scale=2.0)
    np.testing.assert_array_equal(got, 2 * (A @ B))


def test_a_configuration_can_be_given(kernel):
    got = vmap_with_config(kernel, in_axes=(0, None), cfg=3)(A, B)
    np.testing.assert_array_equal(got, 3 * (A @ B))


def test_the_configuration_of_a_call_precedes_that_of_the_batch(kernel):
    for given in (None, 3):
        got = vmap_with_config(kernel, in_axes=(0, None), cfg=given)(A, B, cfg=2)
        np.testing.assert_array_equal(got, 2 * (A @ B))


def test_an_executor_can_be_given(kernel):
    class Always:
        def choose(self, inv, kernel):
            return 5

    got = vmap_with_config(kernel, in_axes=(0, None), executor=Executor(Always()))(A, B)
    np.testing.assert_array_equal(got, 5 * (A @ B))


def test_the_default_executor_of_the_call_is_used(kernel):
    batched = vmap_with_config(kernel, in_axes=(0, None))
    chain = ConfigSelectorChain()
    ops.set_default_executor(Executor(chain))
    batched(A, B)
    assert len(chain.cache) == 1


def test_an_axis_name_reaches_collectives(kernel):
    got = vmap_with_config(kernel, in_axes=(0, None), axis_name="batch")(A, B, axis="batch")
    np.testing.assert_array_equal(got, np.stack([(A @ B).sum(0)] * 2))


def test_a_batch_can_be_differentiated(kernel):
    got = jax.grad(lambda a: vmap_with_config(kernel, in_axes=(0, None))(a, B).sum())(A)
    np.testing.assert_array_equal(got, jax.grad(lambda a: (a @ B).sum())(A))


def test_devices_run_their_slices(kernel):
    parts = np.stack([A[0] * i for i in range(8)])
    got = pmap_with_config(kernel, axis_name="devices", in_axes=(0, None))(parts, B)
    np.testing.assert_array_equal(got, parts @ B)


def test_an_axis_name_reaches_collectives_among_devices(kernel):
    parts = np.stack([A[0] * i for i in range(8)])
    got = pmap_with_config(kernel, axis_name="devices", in_axes=(0, None))(parts, B, axis="devices")
    np.testing.assert_array_equal(got[0], (parts @ B).sum(0))


def test_devices_share_a_given_configuration(kernel):
    parts = np.stack([A[0]] * 4)
    got = pmap_with_config(kernel, in_axes=(0, None), cfg=3, devices=jax.devices()[:4])(parts, B)
    np.testing.assert_array_equal(got, 3 * (parts @ B))


def test_a_device_runs_the_local_call(kernel):
    with ops.recording() as seen:
        pmap_with_config(kernel, in_axes=(0, None))(np.stack([A[0]] * 8), B)
    assert [inv.args[0].shape for inv in seen] == [(3, 4)]
