# SPDX-License-Identifier: Apache-2.0
"""Slices of float32 backwards with too many rows: the kernel's results are replaced by those of plain JAX."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.kernels.attention_cases import CAUSAL, Case

from ejkernel import compat
from ejkernel.kernels.flash_attention.common import Rules, describe
from ejkernel.kernels.flash_attention.mosaic_gpu.params import BackwardParams
from ejkernel.kernels.flash_attention.xla import Xla
from ejkernel.ops import BwdParams

PLAIN = Case(batch=1, queries=300, keys=320, heads=4, groups=2, rules=CAUSAL)
CASES = {
    "queries": (dataclasses.replace(PLAIN, groups=4), 256),
    "full": (dataclasses.replace(PLAIN, rules=Rules(scale=0.3)), 128),
    "window": (dataclasses.replace(PLAIN, rules=Rules(scale=0.3, left=40, right=7)), 128),
    "keys after": (dataclasses.replace(PLAIN, rules=Rules(scale=0.3, left=40, right=150)), 128),
    "segments": (dataclasses.replace(PLAIN, segments=True), 128),
    "mask": (dataclasses.replace(PLAIN, mask=(1, 4, 300, 320)), 128),
    "mask of keys": (dataclasses.replace(PLAIN, mask=(1, 1, 1, 320)), 128),
}


@pytest.fixture
def slices(monkeypatch):
    """Run slices in plain JAX, record them, and return the module."""
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    from ejkernel.kernels.flash_attention.mosaic_gpu import slices

    rows = []

    def record(operands, residuals, dout, rules, _):
        rows.append(operands.query.shape[1] * operands.query.shape[2] // operands.key.shape[2])
        return Xla().differentiate(operands, residuals, dout, rules, BwdParams())

    monkeypatch.setattr(slices, "backward_of_single", record)
    return slices, rows


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_slices_have_the_gradients_of_the_whole(slices, monkeypatch, name):
    (module, rows), (case, most) = slices, CASES[name]
    monkeypatch.setattr(module, "MOST_ROWS", most)
    operands = case.operands()
    if name in ("full", "window"):
        operands = operands._replace(query_lengths=jnp.asarray([290]), key_lengths=jnp.asarray([200]))
    dout = np.random.default_rng(1).standard_normal(operands.query.shape, np.float32)

    @jax.jit
    def gradients(operands, dout):
        residuals = Xla().attend(operands, case.rules, Xla().heuristic(describe(operands, case.rules)))
        arguments = (operands, residuals, dout, case.rules)
        return (
            module.backward_in_slices(*arguments, BackwardParams())[:3],
            Xla().differentiate(*arguments, BwdParams())[:3],
        )

    found, expected = gradients(operands, dout)
    assert max(rows) <= most
    assert len(rows) > 1
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * np.abs(theirs).max())


def call_of(case, **fields):
    return describe(case.types(), case.rules, backward=True, **fields)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "heads", "expected"),
    [
        ((8192, 8192), (32, 8), (1, 8192)),
        ((8192, 8192), (64, 8), (2, 8192)),
        ((8192, 8192), (20, 4), (5, 8192)),
        ((40000, 40000), (2, 1), (2, 20096)),
        ((70000, 70000), (1, 1), (1, 23424)),
    ],
)
def test_the_number_of_slices(slices, lengths, heads, expected):
    module = slices[0]
    case = Case(batch=1, queries=lengths[0], keys=lengths[1], heads=heads[0], groups=heads[1], rules=CAUSAL)
    call = call_of(case)
    found = module.slices_of(call)
    assert found == expected
    part = module.slice_of(call)
    assert part.query[1] * part.query[2] // part.key[2] <= module.MOST_ROWS
    assert found.is_whole(call) == (part == call)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"bias": (1, 1, 1, 33000)}, "bias"),
        ({"rules": Rules(scale=0.3, dropout_rate=0.1)}, "dropout"),
        ({"keys": 16}, "as many keys as queries"),
        ({"queries": 32768}, None),
        ({}, None),
    ],
)
def test_calls_that_cannot_be_sliced_are_refused(slices, fields, word):
    case = Case(batch=1, queries=33000, keys=33000, heads=1, groups=1)
    reason = slices[0].slicing_reason(call_of(dataclasses.replace(case, **fields)))
    assert (reason is None) == (word is None)
    assert word is None or (word in reason and "33000 rows" in reason)
