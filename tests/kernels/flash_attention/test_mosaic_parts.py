# SPDX-License-Identifier: Apache-2.0
"""Few tiles on Hopper: parts of keys or queries as examples, heads as queries; plain JAX is in the kernels' place."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks.attention_cases import case_named
from tests.arrays import on_device
from tests.kernels.attention_cases import Case, by_reference, call_of, reference_with_gradients

from ejkernel.kernels.flash_attention.common import Rules, describe
from ejkernel.kernels.flash_attention.mosaic_gpu import backward_support, forward_support, implementation
from ejkernel.kernels.flash_attention.mosaic_gpu.few_queries import folded, folds
from ejkernel.kernels.flash_attention.mosaic_gpu.params import BackwardParams, ForwardParams
from ejkernel.kernels.flash_attention.mosaic_gpu.parts import (
    backward_in_key_parts,
    backward_in_query_parts,
    forward_in_parts,
)
from ejkernel.kernels.flash_attention.xla import Xla
from ejkernel.ops import BwdParams, ConfigError

pytestmark = pytest.mark.usefixtures("strict")
RULES = Rules(scale=0.3)
CROSS = Case(batch=2, queries=12, keys=20, heads=4, groups=2, value_dim=8, rules=RULES)
LENGTHS = jnp.asarray([13, -(2**31)])


@pytest.fixture
def strict():
    """No array is broadcast to more axes, or converted, without saying so."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def gradients_of(operands, rules, dout):
    return (*reference_with_gradients(operands, rules, dout)[1], None)


def assert_alike(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "used"), [(4, 4), (6, 2), (3, 1)])
def test_parts_of_keys_give_the_output_of_all(parts, used):
    """The second example has no keys, and the first none in its last parts."""
    batches = []

    def attend(operands):
        batches.append(operands.key.shape[0])
        return by_reference(operands, RULES)

    operands = CROSS.operands()._replace(key_lengths=LENGTHS)
    assert_alike(forward_in_parts(operands, parts, attend), by_reference(operands, RULES))
    assert batches == [2 * used]


@pytest.mark.slow
@pytest.mark.parametrize("keys", [1000, 1024])
def test_a_causal_mask_hides_nothing_from_a_single_query(keys):
    """So the parameters for 1,024 keys, where heads count as queries, also run calls of fewer keys in their bucket."""
    rules = Rules(scale=0.3, right=0)
    case = dataclasses.replace(CROSS, queries=1, keys=keys, rules=rules)
    call = describe(case.types("bfloat16"), rules, platform="gpu")
    assert implementation.MosaicGpu().params_fault(call, ForwardParams(key_parts=4)) is None
    operands = case.operands()._replace(key_lengths=LENGTHS)
    found = forward_in_parts(operands, 4, lambda own: by_reference(own, rules))
    assert_alike(found, by_reference(operands, rules))


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "used"), [(4, 4), (8, 4), (5, 1)])
def test_parts_of_queries_give_the_gradients_of_all(parts, used):
    batches = []

    def pull(operands, residuals, dout):
        batches.append(operands.query.shape[0])
        assert_alike(residuals, by_reference(operands, RULES))
        return gradients_of(operands, RULES, dout)

    operands = CROSS.operands()._replace(key_lengths=LENGTHS)
    residuals = by_reference(operands, RULES)
    dout = jnp.cos(residuals[0])
    found = backward_in_query_parts(operands, residuals, dout, parts, pull)
    assert_alike(found, gradients_of(operands, RULES, dout))
    assert batches == [2 * used]


@pytest.mark.slow
def test_parts_of_keys_give_the_gradients_of_all():
    """A part of the keys has the output and the log-sum-exp of all."""
    operands = CROSS.operands()._replace(key_lengths=LENGTHS)
    residuals = by_reference(operands, RULES)
    dout = jnp.cos(residuals[0])

    def pull(operands, residuals, dout):
        assert operands.key.shape[0] == 2 * 5
        rules = dataclasses.replace(RULES, partial=True)
        return Xla().differentiate(operands, residuals, dout, rules, BwdParams())

    found = backward_in_key_parts(operands, residuals, dout, 5, pull)
    assert_alike(found, gradients_of(operands, RULES, dout))


@pytest.mark.slow
@pytest.mark.parametrize("sinks", [None, on_device([0.3, -1.0, 2.0, 0.1], "float32")])
@pytest.mark.parametrize(("queries", "rules"), [(3, RULES), (1, Rules(scale=0.3, right=0))], ids=["three", "causal"])
def test_heads_as_queries_give_the_results_of_all_heads(queries, rules, sinks, monkeypatch):
    case = dataclasses.replace(CROSS, queries=queries, keys=1024, rules=rules)
    operands = case.operands()._replace(key_lengths=jnp.asarray([1000, 3]), sinks=sinks)
    seen = []

    def forward(operands, rules, params):
        seen.append((operands.query.shape, rules.right, operands.sinks))
        return by_reference(operands, rules)

    def backward(operands, residuals, dout, rules, params):
        assert_alike(residuals, by_reference(operands, rules))
        return gradients_of(operands, rules, dout)

    monkeypatch.setattr(implementation, "forward_of_single", forward)
    monkeypatch.setattr(implementation, "backward_in_slices", backward)
    kernel = implementation.MosaicGpu()
    assert_alike(kernel.attend(operands, rules, ForwardParams()), by_reference(operands, rules))
    assert seen == [((2, 2 * queries, 2, 16), None, None)]
    own = operands._replace(sinks=None)
    residuals = by_reference(own, rules)
    dout = jnp.cos(residuals[0])
    found = kernel.differentiate(own, residuals, dout, rules, BackwardParams())
    assert_alike(found, gradients_of(own, rules, dout))


HIDING = {
    "a causal mask": {"rules": Rules(scale=0.3, right=0)},
    "a window": {"rules": Rules(scale=0.3, left=5)},
    "a bias": {"bias": (1, 4, 12, 1024)},
    "a mask": {"mask": (1, 1, 12, 1024)},
    "segments": {"segments": True},
    "dropout": {"rules": Rules(scale=0.3, dropout_rate=0.1)},
}


@pytest.mark.parametrize("change", HIDING.values(), ids=HIDING)
def test_what_hides_keys_from_some_queries_excludes_both(change):
    case = dataclasses.replace(CROSS, keys=1024)
    assert folds(describe(case.types("bfloat16"), case.rules))
    case = dataclasses.replace(case, **change)
    call = describe(case.types("bfloat16"), case.rules, platform="gpu")
    assert folded(call) == call
    for support, params in (
        (forward_support, ForwardParams(key_parts=2)),
        (backward_support, BackwardParams(query_parts=2)),
    ):
        assert "_parts must be 1 with " in support.params_fault(call, params)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("full B1 T16/4096 H32/8 D128", 8),  # 13.7 us instead of 40.6
        ("full B1 T128/16384 H4/4 D128 lengths", 16),  # 21.5, and 47.5 in one part
        ("full B1 T64/8192 H16/2 D256", 8),  # 27.4, and 111.6
        ("full B1 T512/50176 H8/8 D64", 2),  # 191, and 354; 177 in four parts
        ("full B1 T4096 H1/1 D128", 2),  # 27.0, and 37.0
        ("full B1 T256 H1/1 D64", 1),
        ("full B4 T64/4096 H32/8 D128", 1),
        ("causal B1 T4096 H1/1 D128", 1),
    ],
)
def test_few_tiles_have_as_many_parts_of_keys_as_the_fastest_on_one_h200(name, parts):
    call = folded(call_of(case_named(name)))
    params = forward_support.heuristic(call)
    assert params.key_parts == parts
    assert forward_support.params_fault(call, params) is None
    assert params in forward_support.space(call)


@pytest.mark.parametrize(
    ("name", "backward", "ours"),
    [
        ("full B8 T16/4096 H32/8 D128", False, True),  # 42 us, cuDNN 103
        ("full B8 T16/4096 H32/8 D128", True, True),  # 133, and 486
        ("full B16 T16/4096 H8/8 D64", False, True),  # 34, and 40
        ("full B16 T16/4096 H8/8 D64", True, False),  # 222, and 143
        ("full B1 T1/4096 H32/8 D128", False, False),  # 12.7, and 10.3
        ("full B16 T1/4096 H8/8 D64", False, True),  # 33, and 38
        ("full B1 T100/3000 H8/8 D128", False, True),  # 13.3, and 43
        ("full B2 T2048/128 H16/4 D128", True, True),  # 79, and 113
    ],
)
def test_cross_attention_uses_the_faster_of_our_kernels_and_cudnn(name, backward, ours):
    call = call_of(case_named(name), backward=backward, device_fingerprint="gpu:nvidia_h200")
    assert implementation.MosaicGpu().preference(call) == ours


def test_the_choice_beside_cudnn_needs_no_heuristic_where_nothing_is_divided(monkeypatch):
    """The heuristic of a large gradient takes up to a second, and the choice a millisecond."""
    call = call_of(case_named("causal B2 T4096 H32/8 D128"), backward=True)
    monkeypatch.setattr(implementation.MosaicGpu, "heuristic", None)
    assert implementation.MosaicGpu().preference(call) == 1


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("full B1 T16384/333 H24/24 D128", 8),  # 623 us instead of 788
        ("full B4 T9216/77 H5/5 D64", 6),  # 106, and 263 in one part
        ("full B2 T2048/128 H16/4 D128", 4),  # 79, and 119
        ("full B1 T4096 H2/2 D64", 2),  # 63, and 95 in one part of larger blocks of keys
        ("full B1 T4096 H4/4 D128", 1),  # 166, and 189 in two parts
        ("full B8 T1024/77 H20/20 D64", 1),  # 105, and 113
        ("causal B1 T4096 H2/2 D64", 1),
        ("full B1 T577/77 H2/2 D64", 1),  # no number divides the queries
        ("full B2 T1000/64 H96/3 D128", 2),  # fewer parts of the heads than without: not measured
    ],
)
def test_few_keys_have_as_many_parts_of_queries_as_the_fastest_on_one_h200(name, parts):
    call = call_of(case_named(name), backward=True)
    params = backward_support.heuristic(call)
    assert params.query_parts == parts
    assert backward_support.params_fault(call, params) is None
    assert params in backward_support.space(call)


@pytest.mark.parametrize(
    ("name", "parts"),
    [("full B1 T4/16384 H16/2 D256", 32), ("full B4 T8/2048 H8/8 D256", 4), ("full B4 T64/4096 H32/8 D256", 1)],
)
def test_gradients_of_few_queries_and_wide_heads_have_parts_of_keys(name, parts):
    call = folded(call_of(case_named(name), backward=True))
    params = backward_support.heuristic(call)
    assert params.key_parts == parts
    assert backward_support.params_fault(call, params) is None
    assert params in backward_support.space(call)


def test_a_call_that_no_preferred_parameters_fit_has_others():
    """Dropout takes registers; the search space, which contains the heuristic's parameters, then has the first ones."""
    rules = Rules(scale=0.3, right=0, dropout_rate=0.3)
    case = Case(queries=48, keys=48, heads=4, groups=2, head_dim=16, value_dim=16, rules=rules)
    call = describe(case.types("bfloat16"), rules, platform="gpu", backward=True)
    params = backward_support.heuristic(call)
    assert backward_support.params_fault(call, params) is None
    assert params in backward_support.space(call)


def test_a_part_may_take_more_shared_memory_than_the_whole():
    """The keys of a part, 150, are no multiple of 8, and 600 are."""
    call = call_of(case_named("full B1 T600 H1/1 D256"))
    space = forward_support.space(call)
    assert {params.key_parts for params in space} == {1, 4}
    assert [params for params in space if forward_support.params_fault(call, params) is not None] == []


def test_parts_are_checked():
    with pytest.raises(ConfigError, match=r"query_parts must be .* got 0"):
        BackwardParams(query_parts=0)
    with pytest.raises(ConfigError, match=r"key_parts must be .* got 0"):
        ForwardParams(key_parts=0)
    with pytest.raises(ConfigError, match=r"key_parts must be 1 unless form='split' and query_parts=1, got 2"):
        BackwardParams(key_parts=2)
