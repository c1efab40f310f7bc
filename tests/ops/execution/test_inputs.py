# SPDX-License-Identifier: Apache-2.0
"""`autotune(inputs=...)`: the inputs for measuring, and the messages if they differ from the given ones."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import autotune, tune
from ejkernel.ops.errors import ArgumentError, TuningError, TuningWarning

X = np.ones(8, np.float32)
SIZES = np.array([3, 5], np.int32)


def made(name, function, **options):
    return tune(function, space={"rows": [1, 2]}, name=name, **options)


def needs_whole_sizes(x, sizes, *, rows=1):
    """NaN everywhere, unless the sizes add up."""
    return jnp.where(sizes.sum() == x.shape[0], x.reshape(rows, -1).sum(0).sum(), jnp.nan)


def tuned(kernel, *args, **options):
    """Return the configuration and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TuningWarning)
        config = autotune(kernel, *args, num_iters=1, num_warmup=0, **options)
    return config, [str(warning.message) for warning in caught if issubclass(warning.category, TuningWarning)]


def test_unused_integer_inputs_are_reported_with_the_consequence():
    _, said = tuned(made("silent", needs_whole_sizes), X, SIZES)
    assert "not on the arrays given; sizes (int32) will be zeros and ones. Pass inputs=True" in said[0]
    assert "silent: result 0 is NaN or infinite everywhere" in said[1]
    assert "give it example_inputs, or pass inputs= to autotune" in said[1]
    assert len(said) == 2


@pytest.mark.parametrize(
    "inputs",
    [True, (X, SIZES), [X, SIZES], lambda rng: (X, rng.permutation(SIZES)), lambda rng: ((X,), {"sizes": SIZES})],
    ids=["those given", "tuple", "list", "function", "function with keywords"],
)
def test_inputs_of_the_user_s_are_measured_with(inputs):
    assert tuned(made("given", needs_whole_sizes), X, SIZES, inputs=inputs)[1] == []


def test_example_inputs_of_the_decorator_are_measured_with():
    kernel = made("examples", needs_whole_sizes, example_inputs=lambda inv, rng: (X, SIZES))
    assert tuned(kernel, X, SIZES)[1] == []


def test_a_key_of_random_numbers_is_an_input_like_any_other():
    def noisy(key, x, *, rows=1):
        return x.reshape(rows, -1).sum() + jax.random.normal(key, ())

    assert tuned(made("noisy", noisy), jax.random.key(0), X)[1] == []


def test_only_floats_are_generated_without_a_message():
    assert tuned(made("floats", lambda x, *, rows=1: x.reshape(rows, -1).sum()), X)[1] == []


def test_inputs_are_as_the_call_s_arrays_are():
    with pytest.raises(TuningError, match=r"shapes: inputs must be arrays of types .*got \[\(\(4,\), 'float32'\)"):
        tuned(made("shapes", needs_whole_sizes), X, SIZES, inputs=(X[:4], SIZES))


def test_all_nan_candidates_are_reported_with_the_fix():
    def plain(x):
        return x.sum()

    kernel = made("all_nan", lambda x, *, rows=1: x.sum() * jnp.nan, reference=plain)
    with pytest.raises(TuningError, match=r"has NaN or infinity .*give it example_inputs, or pass inputs= to autotune"):
        autotune(kernel, X)


@pytest.mark.parametrize(
    ("target", "args", "inputs", "message"),
    [
        (made("refused", needs_whole_sizes), (X, SIZES), 3, "inputs must be True .* got 3"),
        (made("refused", needs_whole_sizes), (jax.ShapeDtypeStruct((8,), np.float32), SIZES), True, "needs arrays"),
        (jnp.sin, (X,), True, "inputs= needs a Kernel"),
    ],
    ids=["number", "types", "function"],
)
def test_invalid_inputs_are_refused(target, args, inputs, message):
    with pytest.raises(ArgumentError, match=message):
        autotune(target, *args, inputs=inputs)
