# SPDX-License-Identifier: Apache-2.0
"""`autotune(kernel, calls=[...])`: one configuration for several calls."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.ops.autotuner.made_up_times import interleaved_with

from ejkernel.ops import autotune, default_executor, policy_override, tune
from ejkernel.ops.autotuner.bench import timing
from ejkernel.ops.errors import ArgumentError

SHORT, LONG = (jax.ShapeDtypeStruct((n,), jnp.float32) for n in (16, 48))
SECONDS = {1: {16: 2.0, 48: 2.0}, 2: {16: 1.0, 48: 3.0}, 4: {16: 3.0, 48: 1.0}}


def scaled(x, factor=2.0, *, rows=1):
    """`factor * x`, in any number of rows."""
    return (x.reshape(rows, -1) * factor).reshape(x.shape)


@pytest.fixture
def kernel():
    return tune(scaled, space={"rows": [1, 2, 4]}, name="scaled_together")


@pytest.fixture
def times(monkeypatch):
    def time_of(config, case):
        return SECONDS[config["rows"]][int(case.arguments.partition("[")[2].partition("]")[0])]

    monkeypatch.setattr(timing, "interleaved", interleaved_with(time_of))


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "rows"), [(None, 2), ([1, 1], 2), ([1, 3], 4)])
def test_calls_share_the_configuration_with_the_best_mean(kernel, times, weights, rows):
    assert autotune(kernel, calls=[(SHORT,), (LONG,)], weights=weights) == {"rows": rows}
    for x in (SHORT, LONG):
        answer = default_executor().explain(kernel, x)
        assert (answer.config, answer.source) == ({"rows": rows}, "autotune")


@pytest.mark.slow
def test_keywords_hold_for_every_call_that_does_not_say_otherwise(kernel, times):
    calls = [(SHORT,), ((LONG,), {"factor": 3.0})]
    autotune(kernel, calls=calls, factor=5.0)
    explained = [default_executor().explain(kernel, x, factor=f) for x, f in ((SHORT, 5.0), (LONG, 3.0), (LONG, 5.0))]
    assert [one.source for one in explained] == ["autotune", "autotune", "heuristic"]


@pytest.mark.slow
def test_calls_may_be_measured_on_the_arrays_given(kernel, monkeypatch):
    seen = set()
    real = timing.Runner

    class Seen(real):
        def __init__(self, function, argument_sets, **options):
            seen.add(tuple(float(arrays[0][0]) for arrays in argument_sets))
            super().__init__(function, argument_sets, **options)

    monkeypatch.setattr(timing, "Runner", Seen)
    ones, twos = np.ones(16, np.float32), np.full(48, 2.0, np.float32)
    with policy_override(cold_cache=False):
        autotune(kernel, calls=[(ones,), (twos,)], inputs=True, num_iters=1, num_warmup=0)
    assert {values[0] for values in seen} == {1.0, 2.0}


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        (
            (SHORT,),
            {"calls": [(LONG,)]},
            "calls replace the arguments of a single call; got both calls and 1 arguments",
        ),
        ((), {"calls": []}, r"calls must be a list of tuples of arguments, one for each call, got \[\]"),
        ((), {"calls": {"a": 1}}, "calls must be a list of tuples"),
        ((), {"calls": [SHORT]}, r"calls\[0\] must be a tuple of arguments, or \(args, kwargs\), got"),
        ((SHORT,), {"weights": [1]}, r"weights need calls, which are not given; got \[1\]"),
        ((), {"calls": [(SHORT,)], "weights": [1, 2]}, "weights must be a list of 1 numbers, one for each of calls"),
        ((), {"calls": [(SHORT,)], "weights": [0]}, r"weights\[0\] must be a positive number up to .*, got 0"),
        (
            (),
            {"calls": [(SHORT,)], "weights": [True]},
            r"weights\[0\] must be a positive number up to .*, got True",
        ),
        ((), {"calls": [(SHORT,)], "inputs": (1,)}, "inputs must be True or left out if calls are given"),
    ],
)
def test_arguments_that_conflict_are_an_error_with_their_names(kernel, args, options, message):
    with pytest.raises(ArgumentError, match=message):
        autotune(kernel, *args, **options)


@pytest.mark.parametrize("name", ["calls", "weights"])
def test_a_function_has_no_calls_to_choose_for(name):
    with pytest.raises(ArgumentError, match=f"{name}= needs a Kernel; a function is tuned with its arguments"):
        autotune(lambda x: x, **{name: [1]})


@pytest.mark.slow
def test_a_search_that_ran_out_of_time_returns_the_best_so_far(kernel, times):
    with policy_override(budget_s=1e-6):
        assert autotune(kernel, calls=[(SHORT,), (LONG,)]) == {"rows": 1}


@pytest.mark.slow
def test_two_calls_of_one_key_count_as_one_with_both_weights(kernel, times):
    calls = [(SHORT,), (LONG,), (np.zeros(48, np.float32),)]
    assert autotune(kernel, calls=calls) == {"rows": 4}
