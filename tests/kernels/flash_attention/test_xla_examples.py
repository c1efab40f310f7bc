# SPDX-License-Identifier: Apache-2.0
"""Plain JAX on a GPU computes examples one after another if their scores are large; tested on a CPU."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.kernels.attention_cases import Case, by_reference, reference_with_gradients

from ejkernel.kernels.flash_attention import _xla_blocks
from ejkernel.kernels.flash_attention.common import Rules, describe
from ejkernel.kernels.flash_attention.xla import Xla
from ejkernel.ops import BwdParams, FwdParams

CASE = Case(batch=6, queries=24, keys=24, heads=2, groups=1, mask=(1, 1, 24, 24), rules=Rules(scale=0.3, right=0))
XLA, FORWARD, BACKWARD = Xla(), FwdParams(q_blocksize=None, kv_blocksize=None), BwdParams()


@pytest.fixture
def gpu(monkeypatch):
    """Pretend to be on a GPU on which the scores of two examples fit in memory."""
    monkeypatch.setattr(_xla_blocks.compat.programs, "target_kind", lambda: "gpu")
    monkeypatch.setattr(_xla_blocks, "_MOST_SCORES", 2 * 2 * 24 * 24)


def both_directions(operands):
    @jax.jit
    def run(operands):
        out, lse = XLA.attend(operands, CASE.rules, FORWARD)
        return out, lse, XLA.differentiate(operands, (out, lse), jnp.cos(out), CASE.rules, BACKWARD, dlse=jnp.sin(lse))

    return jax.tree.leaves(run(operands))


@pytest.mark.slow
def test_results_are_those_of_all_examples_at_once(request):
    operands = CASE.operands()._replace(key_lengths=jnp.asarray([24, 3, 0, 20, 11, 24]))
    expected = both_directions(operands)
    request.getfixturevalue("gpu")
    assert _xla_blocks.examples_at_once(describe(operands, CASE.rules), None, None) == 2
    for one, other in zip(both_directions(operands), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("gpu")
def test_a_bias_is_part_of_a_single_block():
    """A row may have nothing but the lowest float, or minus infinity."""
    bias = jnp.zeros((1, 2, 24, 24)).at[0, 0, 3].set(jnp.finfo(jnp.float32).min).at[0, 1, 5].set(-jnp.inf)
    case = dataclasses.replace(CASE, batch=1, bias=bias.shape)
    operands = case.operands()
    operands = operands._replace(bias=operands.bias + bias)
    found = jax.jit(lambda operands: XLA.attend(operands, case.rules, FORWARD, keeps_lse=False))(operands)
    expected = by_reference(operands, case.rules)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("gpu")
def test_a_single_visible_block_is_not_the_only_one():
    """The first blocks of queries see no key."""
    case = Case(batch=1, queries=24, keys=4, rules=Rules(scale=0.3, left=0, right=0))
    operands = case.operands()
    params = FwdParams(q_blocksize=4, kv_blocksize=4)
    found = jax.jit(lambda operands: XLA.attend(operands, case.rules, params))(operands)
    for one, other in zip(found, by_reference(operands, case.rules), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


SMALL = {
    "mask": CASE,
    "bias, cap": dataclasses.replace(CASE, mask=None, bias=(1, 2, 24, 24), rules=Rules(scale=0.3, soft_cap=2.0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_a_small_gradient_takes_no_log_sum_exp(case, dtype, monkeypatch):
    monkeypatch.setattr(_xla_blocks.compat.programs, "target_kind", lambda: "gpu")
    operands = case.operands(dtype)._replace(
        key_lengths=jnp.asarray([24, 3, 0, 20, 11, 24]), query_lengths=jnp.asarray([24, 24, 24, 5, 24, 0])
    )

    @jax.jit
    def run(operands):
        out, lse = XLA.attend(operands, case.rules, FORWARD)
        dout = jnp.cos(out)
        return dout, XLA.differentiate(operands, (jnp.nan * out, jnp.nan * lse), dout, case.rules, BACKWARD)

    dout, found = run(operands)
    names = ("query", "key", "value", *(() if operands.bias is None else ("bias",)))
    _, expected = reference_with_gradients(operands, case.rules, dout, names)
    tolerance = 4e-3 if dtype == "float16" else 1e-5
    for one, other in zip([x for x in found if x is not None], expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("change", "more", "block", "is_read"),
    [
        ({}, {}, None, False),
        ({}, {"sinks"}, None, True),
        ({}, {"dlse"}, None, True),
        ({"rules": Rules(scale=0.3, partial=True)}, {}, None, True),
        ({"rules": Rules(scale=0.3, dropout_rate=0.5)}, {}, None, True),
        ({}, {}, 8, True),
        ({"batch": 1 << 13}, {}, None, True),
    ],
    ids=["small", "sinks", "a cotangent of it", "a part of the keys", "dropout", "several blocks", "large"],
)
def test_which_gradients_read_the_log_sum_exp(change, more, block, is_read, monkeypatch):
    monkeypatch.setattr(_xla_blocks.compat.programs, "target_kind", lambda: "gpu")
    case = dataclasses.replace(CASE, mask=None, **change)
    operands, lse = case.types(), jax.ShapeDtypeStruct((case.batch, 2, 24), jnp.float32)
    operands = operands._replace(sinks=jax.ShapeDtypeStruct((2,), jnp.float32) if "sinks" in more else None)

    def pull(operands, out, lse):
        given = {"dlse": lse} if "dlse" in more else {}
        return XLA.differentiate(operands, (out, lse), out, case.rules, BwdParams(q_blocksize=block), **given)

    program = jax.make_jaxpr(pull)(operands, operands.query, lse).jaxpr
    assert is_read == any(program.invars[-1] in equation.invars for equation in program.eqns)


@pytest.mark.parametrize(
    ("change", "blocks", "count"),
    [
        ({}, (24, 24), 2),
        ({"batch": 7}, (24, 24), 1),
        ({"bias": (1, 2, 24, 24)}, (24, 24), 6),
        ({"batch": 1}, (24, 24), 1),
    ],
    ids=["two at once", "no divisor", "a shared gradient", "a single example"],
)
@pytest.mark.usefixtures("gpu")
def test_examples_at_once(change, blocks, count):
    case = dataclasses.replace(CASE, mask=None, **change)
    call = describe(case.types(), case.rules)
    assert count == _xla_blocks.examples_at_once(call, *blocks)


@pytest.mark.slow
def test_wide_heads_have_all_keys_in_a_block():
    """Blocks of other heads keep their scores within 256 MiB for every shape."""

    def blocks(length, dim):
        case = Case(batch=1, queries=length, keys=length, heads=8, groups=1, head_dim=dim, value_dim=dim)
        return _xla_blocks.default_blocks(describe(case.types(), case.rules, platform="gpu"))

    assert [blocks(4096, 512), blocks(8192, 512)] == [(4096, 4096), (1024, 8192)]
    assert blocks(4096, 128) == (1024, 1024)
