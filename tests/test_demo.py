# SPDX-License-Identifier: Apache-2.0
"""The demo's program, on a tiny model, and what it says of its figures."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

HERE = Path(__file__).resolve().parents[1] / "examples" / "demo"


@pytest.fixture
def demo(monkeypatch):
    """Return a function that imports a module of the demo, as the demo itself does."""
    names = ("train", "compare", "demo")
    monkeypatch.syspath_prepend(str(HERE))
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)  # another's, of the same name
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.parametrize("cap", [None, 5.0])
def test_plain_jax_and_ejkernel_train_alike(demo, cap):
    train = demo("train")
    model = train.Model(layers=1, width=32, heads=4, groups=2, batch=2, seq=96, longest=40, dtype=jnp.float32, cap=cap)
    losses = []
    for operations in (train.PLAIN, train.EJKERNEL):
        step, (state, _) = train.training_step(operations, model)
        for number in range(3):
            state, loss = step(state, train.batch_of(model, number))
        losses.append(float(loss))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
def test_a_batch_is_full_of_documents_and_the_same_every_time(demo):
    train = demo("train")
    model = train.Model(layers=1, width=32, heads=4, batch=2, seq=100, longest=30, dtype=jnp.float32)
    first, again = (train.batch_of(model, 7) for _ in range(2))
    assert jnp.array_equal(first.tokens, again.tokens)
    assert int(jnp.bincount(first.documents[0]).max()) <= 30
    assert (jnp.diff(first.documents, axis=1) >= 0).all()
    assert not (first.tokens == 0).any()


def test_the_interval_of_a_ratio_holds_its_median_and_leaves_out_the_extremes(demo):
    found = demo("compare").ratio([float(n) for n in range(1, 22)], [1.0] * 21)
    assert found == {"median": 11.0, "low": 6.0, "high": 16.0}  # ranks 6 and 16 of 21: 97 %
    assert demo("compare").ratio([1.0, 3.0, 2.0] * 2, [1.0] * 6)["low"] == 1.0


@pytest.mark.parametrize(
    ("ratio", "changed", "words"),
    [
        ((1.2, 1.1, 1.3), True, "brought a factor of 1.20"),
        ((1.0, 0.9, 1.1), True, "cannot tell"),
        ((0.8, 0.7, 0.9), True, "made the program slower, by a factor of 1.25"),
        ((1.2, 1.1, 1.3), False, "kept every configuration"),
    ],
)
def test_what_is_said_of_tuning_is_what_the_interval_says(demo, ratio, changed, words):
    median, low, high = ratio
    assert words in demo("demo")._tuning({"median": median, "low": low, "high": high}, changed=changed)
