# SPDX-License-Identifier: Apache-2.0
"""Memory of programs and inputs, and calls that do not fit."""

from __future__ import annotations

import re
import types

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ops import faulty_kernels
from tests.ops.autotuner.made_up_times import interleaved_with
from tests.ops.sample_kernels import told_apart

from ejkernel.ops import Kernel
from ejkernel.ops.autotuner.bench import checking, timing
from ejkernel.ops.autotuner.measure import measurement
from ejkernel.ops.autotuner.measure.measurement import (
    Measurement,
    check_room,
    device_bytes,
    more_bytes,
    num_bytes,
    output_bytes,
    peak_bytes,
    preferred,
)
from ejkernel.ops.autotuner.store import log
from ejkernel.ops.autotuner.trials.challenge import costly_bytes
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
    monkeypatch.setattr(measurement, "device_bytes", lambda: 3 * 2**20)
    check_room(3 * 2**20, "it")
    with pytest.raises(TuningError, match=r"not enough memory for it: 4\.0 MiB needed, 3\.0 MiB on the device\."):
        check_room(4 * 2**20, "it")


def test_nothing_is_refused_if_the_memory_is_unknown(monkeypatch):
    monkeypatch.setattr(measurement, "device_bytes", lambda: None)
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


# --- preference for little memory ---

MIB = 1 << 20
NUMBER = re.compile(r'configuration="(\d)"')  # of `told_apart`
CANDIDATES = st.lists(
    st.tuples(st.floats(0.5, 2.0), st.none() | st.integers(0, 200).map(lambda n: n * MIB)), min_size=1
)


@pytest.mark.parametrize(
    ("mine", "theirs", "more"),
    [
        (112, 100, 12),
        (109, 100, 0),  # less than a tenth
        (100, 112, 0),
        (2, 1, 1),
        (1.5, 1, 0),  # less than a MiB
        (None, 1, 0),
        (1, None, 0),
    ],
)
def test_notable_is_a_mebibyte_and_a_tenth_more(mine, theirs, more):
    in_bytes = [None if need is None else int(need * MIB) for need in (mine, theirs)]
    assert more_bytes(*in_bytes) == more * MIB


@pytest.mark.parametrize(
    ("times", "needs", "chosen"),
    [
        ([1.0, 1.01], [60, 48], 1),  # the same time, 12 MiB less
        ([1.0, 1.2], [60, 48], 0),  # more memory, but much faster
        ([1.0, 1.01, 1.02], [60, 48, 48], 1),
        ([1.0, 1.01, 1.04], [60, 49, 48], 1),  # the fastest of the lean ones, not the leanest
        ([1.0, 1.01], [48, 60], 0),
        ([1.0, 1.01, 1.02], [60, None, 48], 2),
        ([1.0, 1.01], [None, 1], 0),
    ],
)
def test_of_candidates_with_about_the_same_time_a_lean_one_is_preferred(times, needs, chosen):
    in_bytes = [None if need is None else need * MIB for need in needs]
    assert preferred(times, in_bytes, margin=0.05) == chosen


@given(CANDIDATES)
def test_the_preferred_candidate_is_close_and_lean_and_no_other_such_is_before_it(candidates):
    candidates.sort(key=lambda candidate: candidate[0])
    times, needs = zip(*candidates, strict=True)
    chosen = preferred(times, needs, margin=0.05)
    assert times[0] >= times[chosen] * 0.95
    if needs[0] is None:
        assert chosen == 0
        return
    close = [need for time, need in candidates if need is not None and times[0] >= time * 0.95]
    assert not any(more_bytes(needs[chosen], need) for need in close)
    assert all(need is None or more_bytes(need, min(close)) for need in needs[:chosen])


@given(CANDIDATES, st.integers(0, 200))
def test_memory_does_not_matter_if_all_take_the_same_or_one_is_clearly_faster(candidates, need):
    candidates.sort(key=lambda candidate: candidate[0])
    times, needs = zip(*candidates, strict=True)
    assert preferred(times, [need * MIB] * len(times), margin=0.05) == 0
    assert preferred([times[0] * 0.9, *times], [1000 * MIB, *needs], margin=0.05) == 0


class Doubling(Kernel[int, jax.Array]):
    """Doubles an array; `searched` lets each configuration take two MiB times its number."""

    def run(self, x, *, cfg):
        return told_apart(2 * x, cfg)

    def heuristic_cfg(self, inv):
        return 2

    def config_space(self, inv):
        return [2, 3, 4, 5]


def searched(monkeypatch, seconds):
    """Return a search whose candidates take `seconds`; those that it lacks take very long."""
    monkeypatch.setattr(timing, "interleaved", interleaved_with(lambda config: seconds.get(config, 100.0)))
    # Compilers differ in the temporary arrays that they leave out.
    monkeypatch.setattr(checking, "peak_bytes", lambda compiled: 2 * MIB * int(NUMBER.search(compiled.as_text())[1]))
    inv = Invocation(kernel=Doubling(), args=(jnp.arange(64.0),))
    return Autotuner().tune(inv, inv.kernel)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "winner"),
    [
        ({2: 1.0, 4: 0.96}, 2),  # 4 % faster than a lean heuristic
        ({2: 1.0, 4: 0.94}, 4),
        ({2: 1.0, 3: 0.88, 4: 0.87}, 3),  # two winners within 5 %
        ({2: 1.0, 3: 0.88, 4: 0.8}, 4),
        ({2: 1.0, 3: 0.93, 4: 0.87}, 4),  # more than 5 % apart
        ({2: 1.0, 3: 0.99, 4: 0.945}, 4),  # the lean one is no faster than the heuristic
    ],
)
def test_a_search_prefers_little_memory_unless_much_memory_is_clearly_faster(monkeypatch, seconds, winner):
    assert searched(monkeypatch, seconds).config == winner


def test_a_search_says_that_memory_decided(monkeypatch):
    found = searched(monkeypatch, {2: 1.0, 3: 0.88, 4: 0.87, 5: 0.88})
    stored = log.load(log.dump(found, {}).encode().decode().splitlines()[:-1])
    for search in (found, stored):
        assert (
            search.in_words == "1.14x the heuristic's speed (about the same time as 4, which takes 2.0 MiB more memory)"
        )
        assert search.why_not_chosen(search.outcomes[2]) == "within 5% of the chosen one, and takes 2.0 MiB more memory"


def test_a_search_says_that_a_lead_is_too_small_for_its_memory(monkeypatch):
    found = searched(monkeypatch, {2: 1.0, 4: 0.96})
    stored = log.load(log.dump(found, {}).encode().decode().splitlines()[:-1])
    for search in (found, stored):
        assert search.progress.in_words == "complete"
        assert search.in_words == (
            "heuristic kept: 4 is only 1.04x ± 0.0 % as fast as the heuristic and takes 4.0 MiB more memory, for which "
            "it needs 1.05x"
        )
        assert "(threshold 1.05x, since it takes 4.0 MiB more memory)" in search.summary()
        assert search.why_not_chosen(search.outcomes[2]) == (
            "1.04x ± 0.0 %: too little for 4.0 MiB more memory, so the heuristic is kept"
        )


@pytest.mark.parametrize(("method", "bytes_"), [("wall", 4 << 20), ("processor", 4 << 20), ("cupti", 0), ("", 0)])
def test_more_memory_costs_time_only_on_cpus(method, bytes_):
    heavy, light = (
        types.SimpleNamespace(measurement=Measurement(samples=(1.0,), method=method) if method else None, peak_bytes=n)
        for n in (6 << 20, 2 << 20)
    )
    assert costly_bytes(heavy, light) == bytes_
    assert costly_bytes(light, heavy) == 0
