# SPDX-License-Identifier: Apache-2.0
"""Sharding rules: their syntax, the shards of a call, and errors in rules."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from ejkernel.ops import ShardingRule
from ejkernel.ops.core.sharding.rule import factors_of
from ejkernel.ops.core.sharding.split import Shapes, split
from ejkernel.ops.errors import KernelError

MATMUL = ShardingRule("m k, k n -> m n", split="m n k")
HEADS = ShardingRule("b q h d, b k g d -> b q h d", split="b h", follows={"g": "h"})


def arrays(*shapes):
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def divided(rule, operands, results, specs, mesh, move=True):
    factors = factors_of(rule, "op", arrays(*operands), residuals=False)
    shapes = Shapes(operands=operands, results=results, mesh=mesh)
    return split(factors, shapes, [P(*spec) for spec in specs], move=move)


def test_ellipsis_means_the_same_remaining_axes_everywhere():
    rule = ShardingRule("... d, d -> ... d", split="...")
    factors = factors_of(rule, "op", arrays((2, 3, 4), (4,)), residuals=False)
    assert factors.operands == (("...0", "...1", "d"), ("d",))
    assert factors.results == (("...0", "...1", "d"),)
    assert factors.splittable == {"...0", "...1"}


def test_residuals_follow_the_results_and_a_rule_without_them_says_nothing_of_a_forward_that_keeps_some():
    rule = ShardingRule("... d -> ... d", split="...", residuals="...")
    assert factors_of(rule, "op", arrays((2, 4)), residuals=True).results == (("...0", "d"), ("...0",))
    assert factors_of(MATMUL, "op", arrays((2, 4), (4, 2)), residuals=True) is None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ShardingRule("m k", split="m"), "axes must look like"),
        (lambda: ShardingRule("m -> m -> m", split="m"), "axes must look like"),
        (lambda: ShardingRule("m -> m", split="n"), "must name axes of 'm -> m', got 'n'"),
        (lambda: ShardingRule("m -> m", split="m", follows={"m": "h"}), "got 'h'"),
        (lambda: ShardingRule("m -> m", split="m", multiples={"h": 2}), "got 'h'"),
        (lambda: ShardingRule("m -> m", split="m", multiples={"m": 0}), "positive integers, got 0 for 'm'"),
        (lambda: ShardingRule("... m ... -> m", split="m"), r"'\.\.\.' once at most"),
        (lambda: ShardingRule("_ -> _", split="_"), "got '_'"),
        (lambda: factors_of(MATMUL, "op", arrays((2, 2)), residuals=False), "op: .* has 2 arrays, and the call has 1"),
        (lambda: factors_of(MATMUL, "op", arrays((2,), (2, 2)), residuals=False), r"2 axes to an array of shape \[2\]"),
        (lambda: factors_of(MATMUL, "op", arrays((2, 3), (2, 2)), residuals=False), "'k' .* has lengths 3 and 2"),
    ],
)
def test_a_wrong_rule_is_an_error_with_the_reason(make, says):
    with pytest.raises(KernelError, match=says):
        make()


def test_result_without_a_split_axis_is_a_sum_over_the_devices_that_split_it():
    found = divided(MATMUL, ((8, 8), (8, 8)), ((8, 8),), [(None, "x"), ("x", None)], {"x": 4})
    assert found.operand_specs == (P(None, "x"), P("x", None))
    assert found.result_specs == (P(None, None),)
    assert found.sums(found.factors.results[0]) == ("x",)


def test_the_first_array_decides_and_indivisible_axes_stay_whole():
    found = divided(MATMUL, ((8, 8), (8, 6)), ((8, 6),), [("x", None), (None, "y")], {"x": 2, "y": 4}, move=False)
    assert found.operand_specs == (P("x", None), P(None, None))
    found = divided(MATMUL, ((8, 8), (8, 8)), ((8, 8),), [("x", None), (None, "x")], {"x": 2}, move=False)
    assert found.operand_specs == (P("x", None), P(None, None))


@pytest.mark.parametrize(
    ("columns", "mesh", "key"), [(512, {"x": 4}, "x"), (256, {"x": 2, "y": 2}, "x"), (256, {"x": 4}, None)]
)
def test_shards_are_multiples_of_what_the_rule_says(columns, mesh, key):
    rule = ShardingRule("m n -> m n", split="n", multiples={"n": 128})
    found = divided(rule, ((8, columns),), ((8, columns),), [(None, tuple(mesh))], mesh)
    assert found.operand_specs == (P(None, key),)


CHEAP = ShardingRule("m k, g k n -> m n", split="m k g n", cheapest=True)


@pytest.mark.parametrize(
    ("rows", "groups", "given", "wanted"),
    [
        (64, 4, (("x", None), (None, None, None)), "rows"),  # moving four matrices is cheaper than rows and results
        (8, 4, ((None, None), ("x", None, None)), "groups"),
    ],
)
def test_the_cheapest_array_is_moved_if_several_ask_for_the_same_devices(rows, groups, given, wanted):
    specs = [("x", None), ("x", None, None)]
    found = divided(CHEAP, ((rows, 8), (groups, 8, 8)), ((rows, 8),), specs, {"x": 4})
    assert found.operand_specs == tuple(P(*spec) for spec in given), wanted


def test_first_array_decides_where_it_costs_the_same_and_the_rest_is_taken_as_far_as_it_goes():
    found = divided(CHEAP, ((64, 8), (2, 8, 8)), ((64, 8),), [(("x", "y"), None), ("y", None, None)], {"x": 4, "y": 2})
    assert found.operand_specs == (P(("x", "y"), None), P(None, None, None))
    found = divided(CHEAP, ((8, 8), (16, 8, 8)), ((8, 8),), [(("x", "y"), None), ("y", None, None)], {"x": 4, "y": 2})
    assert found.operand_specs == (P("x", None), P("y", None, None))


@given(st.data())
def test_no_more_is_moved_than_if_the_first_array_decided(data):
    entry = st.sampled_from([None, "x", "y", ("x", "y")])
    sizes = {name: data.draw(st.sampled_from([2, 4, 8, 24])) for name in "mkgn"}
    shapes = [tuple(sizes[name] for name in text) for text in ("mk", "gkn", "mn")]
    specs = [P(*[data.draw(entry) for _ in shape]) for shape in shapes]
    first = ShardingRule(CHEAP.axes, split=CHEAP.split)
    moved = [
        divided(rule, tuple(shapes[:2]), tuple(shapes[2:]), specs, {"x": 2, "y": 4}).moved(specs)
        for rule in (CHEAP, first)
    ]
    assert moved[0] <= moved[1]


@pytest.mark.parametrize(
    ("groups", "mesh", "key", "whole"),
    [
        (8, {"x": 4}, "x", False),
        (4, {"x": 4}, "x", False),
        (2, {"x": 4}, None, True),  # each device uses one of two groups
        (2, {"x": 2, "y": 2}, "x", False),  # split as far as it goes
        (1, {"x": 4}, None, False),  # there is nothing to choose
    ],
)
def test_axis_follows_another_as_far_as_it_is_long_enough(groups, mesh, key, whole):
    spec = (None, None, tuple(mesh), None)
    found = divided(HEADS, ((1, 4, 8, 2), (1, 4, groups, 2)), ((1, 4, 8, 2),), [spec], mesh)
    assert found.operand_specs[1] == P(None, None, key, None)
    assert bool(found.whole) is whole


def test_heads_stay_together_if_a_device_would_have_shards_of_two_groups():
    found = divided(HEADS, ((1, 4, 12, 2), (1, 4, 6, 2)), ((1, 4, 12, 2),), [(None, None, "x", None)], {"x": 4})
    assert set(found.operand_specs) == {P(None, None, None, None)}


def test_devices_with_an_indivisible_axis_divide_another_if_allowed():
    shapes = ((8, 4, 4, 2), (8, 4, 4, 2)), ((8, 4, 4, 2),)
    spec = [(None, "x", None, None)]
    assert divided(HEADS, *shapes, spec, {"x": 4}).operand_specs[0] == P("x", None, None, None)
    assert divided(HEADS, *shapes, spec, {"x": 4}, move=False).operand_specs[0] == P(None, None, None, None)


@st.composite
def splits(draw):
    mesh = {"x": draw(st.sampled_from([1, 2, 3, 4])), "y": draw(st.sampled_from([1, 2, 4]))}
    heads, ratio = draw(st.sampled_from([1, 2, 4, 6, 8])), draw(st.sampled_from([1, 2, 3, 4]))
    sizes = {"b": draw(st.integers(1, 8)), "q": 4, "k": 4, "h": heads * ratio, "g": heads, "d": 2}
    shapes = [tuple(sizes[name] for name in text) for text in ("bqhd", "bkgd", "bqhd")]
    entry = st.sampled_from([None, "x", "y", ("x", "y"), ("y", "x")])
    specs = [tuple(draw(entry) for _ in range(4)) for _ in range(2)]
    return shapes, specs, mesh, draw(st.booleans())


@given(splits())
def test_shards_are_whole_and_an_array_uses_each_mesh_axis_once(case):
    shapes, specs, mesh, move = case
    found = divided(HEADS, tuple(shapes[:2]), tuple(shapes[2:]), specs, mesh, move=move)
    for shape, spec in zip(shapes, (*found.operand_specs, *found.result_specs), strict=True):
        used = [axis for entry in spec if entry for axis in (entry if isinstance(entry, tuple) else (entry,))]
        assert len(used) == len(set(used))
        for length, entry in zip(shape, spec, strict=True):
            axes = entry if isinstance(entry, tuple) else (entry,) if entry else ()
            assert length % found.shapes.size(axes) == 0
    local_heads = shapes[0][2] // found.shapes.size(found.axes.get("h", ()))
    local_groups = 1 if "g" in found.whole else shapes[1][2] // found.shapes.size(found.axes.get("g", ()))
    assert local_heads % local_groups == 0


def test_axis_is_split_as_far_as_all_that_follow_it_can_be():
    rule = ShardingRule("b h, g, k -> b h", split="b h", follows={"g": "h", "k": "h"})
    shapes = ((8, 12), (4,), (3,)), ((8, 12),)
    for move, batch in ((False, None), (True, "x")):
        found = divided(rule, *shapes, [(None, "x")], {"x": 2}, move=move)
        assert found.operand_specs == (P(batch, None), P(None), P(None))
    half = divided(HEADS, ((8, 4, 12, 2), (8, 4, 6, 2)), ((8, 4, 12, 2),), [(None, None, ("x", "y"))], {"x": 2, "y": 2})
    assert half.operand_specs[0] == P("y", None, "x", None)


def test_array_that_has_an_axis_twice_is_an_error():
    with pytest.raises(KernelError, match="must not have an axis twice, got 'm m'"):
        ShardingRule("m m -> m", split="m")
