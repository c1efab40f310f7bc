# SPDX-License-Identifier: Apache-2.0
"""A winner is checked on further sets of inputs: fresh, mirrored, small, large and zero ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.ops.autotuner.made_up_times import interleaved_with
from tests.ops.sample_kernels import told_apart

from ejkernel.ops import Invocation, Kernel, TuningWarning
from ejkernel.ops.autotuner.bench import timing
from ejkernel.ops.autotuner.tuner import Autotuner
from ejkernel.ops.core.examples import GivenInputs

X = np.ones(5, np.float32)


class Toy(Kernel[int, jax.Array]):
    """Runs `right` under configuration 1, the heuristic, and `tried` under configuration 2, which is faster."""

    def __init__(self, right, tried, reference=None):
        super().__init__("toy")
        self.right, self.tried, self.plain = right, tried, reference or right

    def run(self, x, *, cfg):
        return told_apart((self.tried if cfg == 2 else self.right)(x), cfg)

    def reference(self, x):
        return self.plain(x)

    def config_space(self, inv):
        return [1, 2]


class WithExamples(Toy):
    """Its inputs are not scaled, because it makes them itself."""

    def example_inputs(self, inv, rng):
        return (rng.standard_normal(inv.args[0].shape, np.float32),), {}


@pytest.fixture(autouse=True)
def faster(monkeypatch):
    monkeypatch.setattr(timing, "interleaved", interleaved_with(lambda config: 1.0 if config == 2 else 2.0))


def tune(kernel, seed=0, **options):
    return Autotuner(seed=seed).tune(Invocation(kernel=kernel, args=(X,)), kernel, **options)


def rejected(kernel, **options):
    """Return why configuration 2 does not win."""
    with pytest.warns(TuningWarning, match="the only candidate beside the heuristic was rejected"):
        data = tune(kernel, **options)
    assert data.config == 1
    return data.outcomes[1].reason


HALF = {
    "first element": lambda x: jnp.where(x[0] > 0, 2.0, 1.0) * x,
    "sum": lambda x: jnp.where(x.sum() < 0, 2.0, 1.0) * x,
    "largest element": lambda x: jnp.where(jnp.argmax(x) > 1, 2.0, 1.0) * x,
}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [Toy, WithExamples], ids=["scaled", "fresh alone"])
@pytest.mark.parametrize("wrong", HALF)
@pytest.mark.parametrize("seed", [0, 3, 5])
def test_a_candidate_wrong_for_half_of_all_inputs_does_not_win(kernel, wrong, seed):
    reason = rejected(kernel(lambda x: x + 0, HALF[wrong]), seed=seed)
    assert "differs from the reference" in reason


@pytest.mark.slow
def test_a_candidate_that_overflows_on_large_inputs_does_not_win():
    reason = rejected(Toy(lambda x: jax.nn.softmax(4 * x), lambda x: jnp.exp(4 * x) / jnp.exp(4 * x).sum()))
    assert reason.startswith("on inputs multiplied by 30: result 0 has NaN or infinity")


def test_a_candidate_that_divides_by_zero_on_zeros_does_not_win():
    assert rejected(Toy(lambda x: x + 0, lambda x: x * x / x)).startswith("on inputs multiplied by 0: result 0 has NaN")


def test_a_candidate_that_loses_small_values_does_not_win():
    def tried(x):
        return jnp.where(jnp.abs(x).max() < 0.1, 0.0, 1.0) * x

    assert rejected(Toy(lambda x: x + 0, tried)).startswith("on inputs multiplied by 0.01: result 0 differs")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "tried"),
    [
        (jnp.sqrt, lambda x: 2 * jnp.sqrt(x / 4)),
        (lambda x: jnp.exp(x * x), lambda x: jnp.exp(x * x / 2) ** 2),
    ],
    ids=["mirrored", "overflowing"],
)
def test_inputs_on_which_the_reference_is_not_finite_are_not_counted(right, tried):
    data = tune(Toy(right, tried))
    assert data.config == 2
    assert 5 <= data.input_sets < 10


def test_rounding_of_large_inputs_is_forgiven_as_far_as_the_heuristic_rounds():
    def rough(x):
        return jnp.sin(jnp.round(x * 8) / 8)

    def exact(x):
        return jnp.where(jnp.abs(x).max() > 5, jnp.sin(x), rough(x))

    data = tune(Toy(rough, lambda x: rough(x) * 1.00001, reference=exact))
    assert data.config == 2


def test_the_result_and_the_entry_have_the_number_of_sets():
    data = tune(Toy(lambda x: x + 0, lambda x: x * 1))
    assert (data.config, data.input_sets, data.summary_data()["input_sets"]) == (2, 10, 10)
    assert "the winner matched the reference on 10 input sets" in data.summary()


def test_inputs_that_the_user_gave_are_used_as_they_are():
    kernel = Toy(lambda x: x + 0, HALF["first element"])
    data = tune(kernel, inputs=GivenInputs((-X,), {}))
    assert (data.config, data.input_sets) == (2, 2)
