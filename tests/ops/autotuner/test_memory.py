# SPDX-License-Identifier: Apache-2.0
"""Memory of programs and inputs, and calls that do not fit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from tests.ops import faulty_kernels

from ejkernel.ops.autotuner.measure import memory
from ejkernel.ops.autotuner.measure.memory import check_room, device_bytes, num_bytes, output_bytes, peak_bytes
from ejkernel.ops.autotuner.tuner import Autotuner
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.errors import TuningError, TuningWarning
from ejkernel.ops.execution.offline import tune_invocations


@pytest.mark.parametrize(
    ("dtype", "expected"), [(jnp.float32, 48), (jnp.bfloat16, 24), (jnp.int8, 12), (jnp.complex64, 96), (bool, 12)]
)
def test_the_bytes_of_an_array_are_those_of_its_elements(dtype, expected):
    assert num_bytes(jax.ShapeDtypeStruct((3, 4), dtype)) == expected


def test_a_key_of_random_numbers_counts_as_eight_bytes():
    assert num_bytes(jax.random.split(jax.random.key(0), 5)) == 40


def test_an_empty_array_takes_nothing():
    assert num_bytes(jnp.zeros((0, 7))) == 0


def test_a_compiled_program_needs_arguments_results_and_temporary_memory():
    x = jnp.ones((256, 256), jnp.float32)
    compiled = jax.jit(lambda x: jnp.sort(x @ x, axis=0)[:2]).lower(x).compile()
    assert output_bytes(compiled) == 2 * 256 * 4
    assert peak_bytes(compiled) > x.nbytes + output_bytes(compiled)


def test_a_compiler_that_does_not_tell_is_no_error():
    class Silent:
        def memory_analysis(self):
            return None

    assert peak_bytes(Silent()) is None
    assert output_bytes(Silent()) is None


def test_the_memory_of_the_host_is_that_of_its_processor():
    assert device_bytes() > 2**28


def test_needing_more_memory_than_the_device_has_is_an_error_with_both_figures(monkeypatch):
    monkeypatch.setattr(memory, "device_bytes", lambda: 3 * 2**20)
    check_room(3 * 2**20, "it")
    with pytest.raises(TuningError, match=r"not enough memory for it: 4\.0 MiB needed, 3\.0 MiB on the device\."):
        check_room(4 * 2**20, "it")


def test_nothing_is_refused_if_the_memory_is_unknown(monkeypatch):
    monkeypatch.setattr(memory, "device_bytes", lambda: None)
    check_room(2**60, "it")


# --- searches ---


def huge():
    kernel = faulty_kernels.failing_on_device
    return Invocation(kernel=kernel, args=(jax.ShapeDtypeStruct((2**22, 2**20), jnp.float32),))


@pytest.mark.slow
@pytest.mark.parametrize("isolate", [False, True], ids=["in this process", "in a worker"])
def test_inputs_that_the_device_cannot_hold_are_an_error_before_anything_is_compiled(isolate):
    inv = huge()
    with pytest.raises(TuningError, match=r"failing_on_device: not enough memory for the inputs: 16384\.0 GiB needed"):
        Autotuner().tune(inv, inv.kernel, policy=AutotunePolicy(isolate=isolate))


@pytest.mark.slow
def test_a_call_with_too_large_inputs_is_a_warning_and_the_next_is_tuned():
    kernel = faulty_kernels.failing_on_device
    small = Invocation(kernel=kernel, args=(jax.ShapeDtypeStruct((4, 4), jnp.float32),))
    with pytest.warns(TuningWarning, match="not enough memory for the inputs"):
        result = tune_invocations(ConfigSelectorChain(), [huge(), small])
    assert [data.inv.args[0].shape for data in result.searches] == [(4, 4)]
