# SPDX-License-Identifier: Apache-2.0
"""Configuration spaces with few valid configurations, long axes, odd values or broken constraints."""

import dataclasses
import itertools
import math
import random
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.ops.autotuner.search.strategies import ModelSearch, Random, default_strategy
from ejkernel.ops.config.spaces import parts
from ejkernel.ops.config.spaces import space as space_module
from ejkernel.ops.config.spaces.parts import Part
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.errors import ArgumentError, ConfigError

TWELVE = {f"axis{i}": [1, 2, 3, 4, 5] for i in range(12)}
WHOLE = {
    "low": lambda a: sum(a.values()) <= 20,
    "high": lambda a: sum(a.values()) >= 52,
    "equal": lambda a: sum(a.values()) == 20,
    "opposed": lambda a: sum(v * (-1) ** i for i, v in enumerate(a.values())) >= 20,
}


@pytest.mark.parametrize("count", [1, 10, parts._SHUFFLED])
def test_a_search_goes_through_every_value_of_an_axis(count):
    assert sorted(parts._levels(range(count), random.Random(0))) == list(range(count))


@pytest.fixture(scope="module", params=list(WHOLE))
def whole(request):
    return ConfigSpace(TWELVE, constraints=WHOLE[request.param])


@pytest.mark.slow
def test_constraints_on_the_last_axis_are_sampled(whole):
    sample = whole.sample(np.random.default_rng(0), 100)
    assert len({tuple(config.values()) for config in sample}) == 100
    assert all(config in whole for config in sample)


@pytest.mark.slow
def test_a_sample_of_such_a_space_depends_only_on_the_generator(whole):
    one = whole.sample_points(np.random.default_rng(1), 20)
    whole.sample_points(np.random.default_rng(2), 20)
    assert one == whole.sample_points(np.random.default_rng(1), 20)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy_of", "name"), [(ModelSearch, "equal"), (Random, "low")])
def test_such_a_space_is_searched(strategy_of, name):
    strategy = strategy_of(ConfigSpace(TWELVE, constraints=WHOLE[name]))
    asked = strategy.ask(1)
    for _ in range(5):
        strategy.tell(asked[-1], 1.0)  # none is better than another, so that no sample is drawn anew
        asked += strategy.ask(1)
    assert len({tuple(config.values()) for config in asked}) == 6


def test_a_configuration_is_found_in_a_space_without_going_through_it():
    calls = []

    def few(a, b):
        calls.append(a)
        return a <= b

    assert {"a": 3, "b": 4} in ConfigSpace({"a": range(500), "b": range(500)}, constraints=few)
    assert calls == [3]


@pytest.mark.slow
def test_the_size_of_such_a_space_is_marked_as_an_estimate(whole):
    assert not whole.exact
    assert whole.points() is None
    assert 1 <= whole.size <= 5**12


@pytest.mark.slow
def test_the_estimated_size_follows_the_acceptance_rate():
    space = ConfigSpace(TWELVE, constraints=lambda a: sum(a.values()) <= 36)
    ways = {0: 1}  # the number of ways to reach each sum with the axes so far
    for values in TWELVE.values():
        ways = Counter({s: sum(ways.get(s - v, 0) for v in values) for s in range(61)})
    assert space.size == pytest.approx(sum(ways[s] for s in range(37)), rel=0.3)


@pytest.mark.slow
def test_a_known_configuration_is_where_others_are_looked_for():
    axes = {f"axis{i}": list(range(10)) for i in range(12)}
    space = ConfigSpace(axes, constraints=lambda a: sum(v != 3 for v in a.values()) <= 2)
    assert len(space.sample_points(np.random.default_rng(0), 50, near=[(3,) * 12])) == 50
    strategy = ModelSearch(space, seeds=[dict.fromkeys(axes, 3)])
    strategy.tell(strategy.ask(1)[0], 1.0)
    assert strategy.ask(1)


def test_one_of_ten_to_the_twelve_is_found_if_constraints_name_their_axes():
    axes = {f"axis{i}": range(10) for i in range(12)}
    pairs = [eval(f"lambda axis{i}, axis{11 - i}: axis{i} + axis{11 - i} == 18") for i in range(6)]
    space = ConfigSpace(axes, constraints=pairs)
    assert space.exact
    assert list(space) == [dict.fromkeys(axes, 9)]


def test_axes_that_nothing_ties_together_are_counted_apart():
    axes = {f"axis{i}": range(1, 9) for i in range(40)}
    constraints = [lambda axis0, axis39: axis0 * axis39 <= 8, lambda axis5, axis7: axis5 < axis7]
    space = ConfigSpace(axes, constraints=constraints)
    assert space.exact
    assert space.size == 20 * 28 * 8**36
    assert len(space) == sys.maxsize
    first = next(iter(space))
    assert (first["axis5"], first["axis7"]) == (1, 2)


def test_ends_of_a_walk_that_lead_nowhere_are_not_walked():
    """That the first axis' first value has no last one is known at once, and not after 8^11 assignments."""
    axes = {f"axis{i}": range(8) for i in range(12)}
    space = ConfigSpace(axes, constraints=lambda axis0, axis11: axis0 + axis11 > 13)
    assert list(itertools.islice(space.walk(), 1)) == [(7, *[0] * 10, 7)]


def test_a_long_walk_without_a_result_is_a_clear_error(monkeypatch):
    monkeypatch.setattr(space_module, "_WALKED", 5000)
    space = ConfigSpace(TWELVE, constraints=WHOLE["high"])
    with pytest.raises(ConfigError, match=r"5000 consecutive assignments of ConfigSpace.* violate a constraint"):
        next(iter(space))


@st.composite
def tied_spaces(draw):
    """A space with constraints between any axes, and its valid configurations, by brute force."""
    axes = {name: list(range(draw(st.integers(1, 4)))) for name in "abcd"[: draw(st.integers(1, 4))]}
    rules = []
    for _ in range(draw(st.integers(0, 3))):
        names = draw(st.lists(st.sampled_from(list(axes)), min_size=1, max_size=3, unique=True))
        rest, whole = draw(st.integers(0, 2)), draw(st.booleans())
        rules.append((names, rest, whole))

    def constraint(names, rest, whole):
        if whole:
            return lambda assignment: sum(assignment[name] for name in names) % 3 != rest
        return eval(f"lambda {', '.join(names)}: ({' + '.join(names)}) % 3 != {rest}")

    every = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    allowed = [a for a in every if all(sum(a[n] for n in names) % 3 != rest for names, rest, _ in rules)]
    return axes, [constraint(*rule) for rule in rules], allowed


@given(tied_spaces())
@settings(max_examples=60)
def test_a_space_agrees_with_brute_force(made):
    axes, constraints, allowed = made
    space = ConfigSpace(axes, constraints=constraints)
    assert space.exact
    assert space.empty() is (not allowed)
    assert [space.assignment(point) for point in space.walk()] == allowed
    if allowed:
        assert space.size == len(space.points()) == len(allowed)
    assert [a for a in ConfigSpace(axes) if a in space] == allowed


@given(tied_spaces(), st.integers(0, 99))
@settings(max_examples=10)
def test_points_found_without_listing_are_valid_and_a_nonempty_space_is_not_called_empty(made, seed):
    axes, constraints, allowed = made
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Part, "find_all", lambda self, effort: None)
        for limit in ("_DRAWN", "_AIMED", "_DESCENDED", "_CHANGED"):
            patched.setattr(parts, limit, 5_000)
        space = ConfigSpace(axes, constraints=constraints)
        if not allowed:
            with pytest.raises(ConfigError, match="found no valid configuration"):
                space.sample(np.random.default_rng(seed), 5)
            return
        sample = space.sample(np.random.default_rng(seed), 5)
        assert all(config in allowed for config in sample)
        assert space.size <= math.prod(map(len, axes.values()))
        assert [space.assignment(point) for point in itertools.islice(space.walk(), 3)] == allowed[:3]


def test_a_narrowed_space_has_the_matching_points():
    space = ConfigSpace({"a": range(9), "b": range(9), "c": range(9)}, constraints=lambda a, b: a + b == 8)
    narrowed = space.narrowed({"a": 3})
    assert list(narrowed) == [{"a": 3, "b": 5, "c": c} for c in range(9)]
    assert space.narrowed({"a": 30}) is None
    assert space.narrowed({"a": 3, "b": 3}).empty()
    listed = ConfigSpace.listed([{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 2, "b": 2}]).narrowed({"a": 1})
    assert list(listed) == [{"a": 1, "b": 2}, {"a": 1, "b": 3}]


class Counting:
    """A long sequence of numbers that counts how many were looked at."""

    def __init__(self, count):
        self.count, self.looks = count, 0

    def __iter__(self):
        for value in range(self.count):
            self.looks += 1
            yield value


def test_a_long_axis_is_gone_through_once():
    long = Counting(100_000)
    space = ConfigSpace({"long": long, "warps": [1, 2, 4]})
    strategy = default_strategy(space)
    for _ in range(8):
        config = strategy.ask(1)[0]
        strategy.tell(config, 1.0 + config["long"])
    assert long.looks == 100_000


@pytest.mark.slow
def test_a_range_is_not_iterated():
    axes = {"rows": range(1, 10**15), "columns": range(0, 10**15, 128), "down": range(10**15, 0, -1)}
    space = ConfigSpace(axes, constraints=lambda rows, columns: rows <= columns)
    assert space.point({"rows": 7, "columns": 1280, "down": 10**15 - 2}) == (6, 10, 2)
    assert {"rows": 7, "columns": 1281, "down": 1} not in space
    strategy = default_strategy(space)
    for _ in range(8):
        config = strategy.ask(1)[0]
        assert config in space
        strategy.tell(config, 1.0 + math.log(config["rows"]))
    assert len(space.neighbours(config)) < 400


@pytest.mark.parametrize("value", [3.0, np.int64(3)])
def test_a_number_is_found_in_ranges_and_tuples(value):
    assert ConfigSpace({"a": range(9)}).locate({"a": value}) == ConfigSpace({"a": list(range(9))}).locate({"a": value})


@pytest.mark.parametrize("value", [True, 3.5, "3", None, math.nan, 10**400])
def test_a_range_contains_only_its_values(value):
    assert {"a": value} not in ConfigSpace({"a": range(9)})


def test_a_long_axis_of_text_is_encoded_in_few_columns():
    space = ConfigSpace({"a": [f"kind{i}" for i in range(10_000)]})
    (columns,) = space.encode([(i,) for i in range(300)])
    assert columns.shape[1] < 100
    distances = ((columns[:, None] - columns[None]) ** 2).sum(-1)[np.triu_indices(300, 1)]
    assert distances.min() > 0.0
    assert distances.mean() == pytest.approx(1.0, abs=0.05)


@given(st.integers(65, 3000), st.booleans(), st.data())
@settings(max_examples=20)
def test_neighbours_on_a_long_axis_are_few_and_mutual(count, numeric, data):
    space = ConfigSpace({"a": range(count) if numeric else [f"k{i}" for i in range(count)]})
    point = (data.draw(st.integers(0, count - 1)),)
    neighbours = space.neighbour_points(point)
    assert len(neighbours) <= 64
    assert all(point in space.neighbour_points(other) for other in neighbours)


def test_thousands_of_axes_are_a_space():
    space = ConfigSpace(
        {f"axis{i}": [1, 2, 3] for i in range(2000)}, constraints=lambda axis0, axis1999: axis0 < axis1999
    )
    assert space.size == 3**1999
    sample = space.sample(np.random.default_rng(0), 3)
    assert all(config in space for config in sample)
    assert isinstance(default_strategy(space), Random)


@pytest.mark.parametrize(
    ("values", "distinct"),
    [
        ([True, 1, 0, False], 4),
        ([(True,), (1,)], 2),
        ([0.5, None, "0.5", 1], 4),
        ([[1], [True], (1,)], 3),
        ([math.nan, 1.0], 2),
        ([2**60, 2**60 + 1, 10**400], 3),
        ([-1e308, 1e308], 2),
        ([np.bool_(True), 1], 2),
    ],
)
def test_values_of_any_kind_are_distinguished_and_encoded(values, distinct):
    space = ConfigSpace({"a": values, "b": [1]})
    assert len(space) == distinct
    assert [space.locate({"a": value, "b": 1}) for value in values] == [(i, 0) for i in range(distinct)]
    assert all(np.isfinite(columns).all() for columns in space.encode(space.points()))


@pytest.mark.parametrize("values", [5, None, range(10**30), b"ab", range(0)])
def test_invalid_axis_values_are_an_error(values):
    with pytest.raises(ConfigError, match=r"axis 'a'|map a name to a sequence"):
        ConfigSpace({"a": values})


@pytest.mark.parametrize(
    "use", [len, list, lambda s: s.sample(np.random.default_rng(0), 1), lambda s: {"a": 0, "b": 1} in s]
)
def test_a_constraint_that_raises_is_named_with_the_assignment(use):
    def divides(a, b):
        return b % a == 0

    with pytest.raises(
        ConfigError, match=r"divides .*test_hard_spaces.py:\d+\) raised ZeroDivision.*\{'a': 0, 'b': 1\}"
    ):
        use(ConfigSpace({"a": [0, 1], "b": [1, 2]}, constraints=divides))


def test_a_constraint_on_a_name_that_does_not_exist_is_named():
    space = ConfigSpace({"rows": [1, 2]}, constraints=lambda a: a["row"] > 1)
    with pytest.raises(ConfigError, match=r"raised KeyError: 'row', for \{'rows': 1\}. It gets the whole assignment"):
        len(space)


def test_a_constraint_may_guard_a_later_one():
    axes = {f"axis{i}": range(9) for i in range(5)}
    constraints = [
        lambda axis3: axis3 > 0,
        lambda axis0, axis3: axis0 % axis3 == 0,
        lambda a: a["axis0"] // a["axis3"] * sum(a.values()) > 60,
    ]
    space = ConfigSpace(axes, constraints=constraints)
    assert all(config in space for config in space.sample(np.random.default_rng(0), 5))


def test_a_constraint_may_have_extra_parameters():
    constraints = [lambda a, limit=2: a <= limit, lambda **assignment: assignment["b"] > 1]
    space = ConfigSpace({"a": [1, 2, 3], "b": [1, 2]}, constraints=constraints)
    assert list(space) == [{"a": 1, "b": 2}, {"a": 2, "b": 2}]


def test_a_constraint_cannot_change_another_s_arguments():
    space = ConfigSpace({"a": [1, 2], "b": [1, 2]}, constraints=[lambda all_: not all_.clear(), lambda x: x["a"] == 1])
    assert [config["a"] for config in space] == [1, 1]


@pytest.mark.parametrize("constraints", [[True], "a > 1", [lambda: True], [lambda *, one: True]])
def test_an_invalid_constraint_is_an_error(constraints):
    with pytest.raises((ArgumentError, ConfigError), match="constraint"):
        ConfigSpace({"a": [1]}, constraints=constraints)


def test_points_beside_the_axes_are_not_in_the_space():
    space = ConfigSpace({"a": [1, 2], "b": [1, 2]}, constraints=lambda a, b: True)
    assert [space.has(point) for point in ((0, 1), (-1, 0), (0, 2), (0,), (0, 0, 0))] == [True, *[False] * 4]


def test_an_assignment_that_lacks_an_axis_is_an_error():
    with pytest.raises(ConfigError, match="has no 'b'"):
        ConfigSpace({"a": [1], "b": [1]}).locate({"a": 1})


def test_errors_about_long_axes_are_short():
    space = ConfigSpace({"a": [f"kind{i}" for i in range(10_000)]})
    with pytest.raises(ConfigError, match=r"'kind7', \.\.\. 10000 values") as error:
        space.locate({"a": "none"})
    assert len(str(error.value)) < 300
    with pytest.raises(ConfigError, match=r"it has range\(0, 10000\)\.$"):
        ConfigSpace({"a": range(10_000)}).locate({"a": -1})


def test_a_configuration_of_another_type_is_read_by_name():
    @dataclasses.dataclass(frozen=True)
    class Tile:
        rows: int

    space = ConfigSpace({"rows": range(1, 10**9)}, build=Tile)
    assert Tile(5) in space
    assert Tile(0) not in space
