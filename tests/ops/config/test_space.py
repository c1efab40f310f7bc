# SPDX-License-Identifier: Apache-2.0
"""Configuration spaces: content, sampling, and the view of a search."""

import dataclasses
import itertools
import math
import pickle
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.ops.config.spaces.space import ENUMERATED, ConfigSpace
from ejkernel.ops.errors import ArgumentError, CallError, ConfigError


@dataclasses.dataclass(frozen=True)
class Tile:
    block_q: int
    block_kv: int
    stages: int | None = None


AXES = {"block_q": [16, 32, 64], "block_kv": [16, 32, 64, 128], "order": ["row", "column"]}

VALUES = st.one_of(
    st.lists(st.integers(1, 512), min_size=1, max_size=6, unique=True),
    st.lists(st.floats(-4, 4, width=16), min_size=1, max_size=4, unique=True),
    st.lists(st.sampled_from(["row", "column", None, "auto"]), min_size=1, max_size=4, unique=True),
    st.just([False, True]),
)


@st.composite
def spaces(draw):
    """A space with a constraint that about half of its assignments meet, and at least one does."""
    axes = {f"axis{i}": draw(VALUES) for i in range(draw(st.integers(1, 4)))}
    products = list(itertools.product(*(range(len(values)) for values in axes.values())))
    kept = draw(st.sampled_from(products))
    parity = draw(st.booleans())

    def allowed(assignment):
        levels = tuple(axes[name].index(value) for name, value in assignment.items())
        return levels == kept or sum(levels) % 2 == parity

    return ConfigSpace(axes, constraints=allowed), allowed


def large():
    axes = {f"axis{i}": [1, 2, 4, 8, 16, 32, 64, 128] for i in range(12)}
    return ConfigSpace(axes, constraints=lambda axis0, axis1: axis0 * axis1 <= 64)


def test_a_configuration_is_by_default_the_assignment():
    assert next(iter(ConfigSpace(AXES))) == {"block_q": 16, "block_kv": 16, "order": "row"}


def test_build_may_be_a_dataclass():
    space = ConfigSpace({"block_q": [16], "block_kv": [32], "stages": [None, 2]}, build=Tile)
    assert [Tile(16, 32), Tile(16, 32, 2)] == list(space)


def test_build_may_be_a_function_of_the_assignment():
    space = ConfigSpace({"block_q": [16, 32]}, build=lambda assignment: Tile(**assignment, block_kv=64))
    assert [Tile(16, 64), Tile(32, 64)] == list(space)


def test_a_configuration_has_its_point_and_the_point_its_configuration():
    space = ConfigSpace({"block_q": [16, 32], "block_kv": [32, 64]}, build=Tile)
    assert Tile(32, 64) == space.config(space.point(Tile(32, 64)))


def test_read_is_the_way_back_where_the_names_differ():
    space = ConfigSpace(
        {"rows": [16, 32]},
        build=lambda assignment: Tile(assignment["rows"], 64),
        read=lambda config: {"rows": config.block_q},
    )
    assert space.point(Tile(32, 64)) == (1,)


def test_without_read_a_configuration_must_have_the_axes():
    space = ConfigSpace({"rows": [16, 32]}, build=lambda assignment: Tile(assignment["rows"], 64))
    with pytest.raises(ConfigError, match=r"has no \['rows'\]; give the space `read=`"):
        space.point(Tile(32, 64))


def test_a_constraint_gets_the_axes_that_it_names():
    space = ConfigSpace(AXES, constraints=lambda block_q, block_kv: block_q < block_kv)
    assert len(space) == 12
    assert all(config["block_q"] < config["block_kv"] for config in space)


def test_a_constraint_may_take_the_whole_assignment():
    assert len(ConfigSpace(AXES, constraints=lambda a: a["order"] == "row")) == 12


def test_all_constraints_have_to_hold():
    constraints = [lambda block_q: block_q > 16, lambda a: a["order"] == "row", lambda block_kv: block_kv == 128]
    assert [(c["block_q"], c["order"]) for c in ConfigSpace(AXES, constraints=constraints)] == [
        (32, "row"),
        (64, "row"),
    ]


def test_constraints_prune_before_later_axes_are_chosen():
    calls = []

    def few(axis0):
        calls.append(axis0)
        return axis0 == 1

    axes = {"axis0": list(range(1, 9)), "axis1": list(range(1000))}
    assert len(ConfigSpace(axes, constraints=few)) == 1000
    assert len(calls) <= 8


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({}, "at least one axis"),
        ({"a": []}, "axis 'a' must have at least one value"),
        ({"a": [1, 2, 1]}, "axis 'a' must name each value once, got 1 twice"),
        ({"a": "row"}, "map a name to a sequence of values"),
        ({"a": {"x", "y"}}, "map a name to a sequence of values"),
    ],
)
def test_axes_are_checked(axes, message):
    with pytest.raises(ConfigError, match=message):
        ConfigSpace(axes)


def test_the_keys_of_a_dictionary_are_values_in_order():
    assert ConfigSpace({"a": {2: "few", 1: "many"}.keys()}).axes[0].values == (2, 1)


def test_a_constraint_on_an_unknown_axis_is_an_error():
    with pytest.raises(ConfigError, match=r"got \['block_k'\]; the axes are block_q"):
        ConfigSpace(AXES, constraints=lambda block_q, block_k: block_q < block_k)


@pytest.mark.parametrize("use", [len, lambda space: space.sample(np.random.default_rng(0), 1)])
def test_constraints_that_nothing_meets_are_an_error(use):
    space = ConfigSpace(AXES, constraints=lambda order: order == "diagonal")
    with pytest.raises(ConfigError, match="no configuration of ConfigSpace"):
        use(space)


def test_the_error_about_an_empty_space_counts_the_rejections_of_each_constraint():
    def fits(block_q, block_kv):
        return block_q * block_kv <= 64 * 64

    def guarded(block_q):
        return 1 / (block_q - 64) > 0

    space = ConfigSpace(
        {"block_q": [64, 128], "block_kv": [64, 128, 256]},
        constraints=[lambda block_q: block_q != 64, guarded, fits, lambda block_kv: block_kv > 64],
    )
    with pytest.raises(ConfigError) as raised:
        space.points()
    assert re.sub(r"\S+\.(\S+) \(\S+\)", r"\1", str(raised.value)) == (
        "no configuration of ConfigSpace(block_q: 2, block_kv: 3; 4 constraints) satisfies the constraints. Of 6 "
        "configurations, the constraint fits, which reads block_q, block_kv, rejects 5; the constraint <lambda>, which "
        "reads block_q, rejects 3; the constraint <lambda>, which reads block_kv, rejects 2; the constraint guarded, "
        "which reads block_q, rejects 0. Relax a constraint, or add values."
    )


def test_rejections_too_many_to_count_are_named_so():
    axes = {f"axis{i}": list(range(40)) for i in range(4)}
    space = ConfigSpace(axes, constraints=[lambda axis0: False, lambda axis0, axis1, axis2, axis3: True])
    with pytest.raises(ConfigError, match=r"Of 2,560,000 .* axis0, rejects 2,560,000; .* too costly to count\. Relax"):
        space.points()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: ConfigSpace(rows=[8, 16]),
            r"^ConfigSpace has no argument `rows`; .* For example: ConfigSpace\(\{",
        ),
        (lambda: ConfigSpace({"a": [1]}, constraint=bool), "^ConfigSpace has no argument `constraint`; did you mean"),
        (lambda: ConfigSpace({"a": [1]}, [bool]), "^ConfigSpace takes 1 argument by position"),
        (lambda: ConfigSpace({"a": [1]}, seeds=3), "^seeds must be a list of configurations, got 3"),
        (lambda: ConfigSpace({"a": [1]}, read=3), "^read must be a function .*, got 3"),
        (lambda: ConfigSpace.listed(3), "^configurations must be a list, got 3"),
    ],
)
def test_wrong_arguments_are_errors_that_name_them(make, text):
    with pytest.raises((ArgumentError, CallError), match=text):
        make()


def test_a_space_can_be_pickled():
    assert list(pickle.loads(pickle.dumps(ConfigSpace({"a": [1, 2]})))) == [{"a": 1}, {"a": 2}]


@pytest.mark.slow
def test_a_space_is_called_empty_only_after_a_complete_listing():
    axes = {f"axis{i}": list(range(10)) for i in range(12)}
    space = ConfigSpace(axes, constraints=lambda a: False)
    assert not space.empty()
    assert not space.exact
    with pytest.raises(
        ConfigError, match=r"found no valid configuration of .* among its 10\^12 assignments, although some may exist"
    ):
        space.sample(np.random.default_rng(0), 1)


def test_a_pair_of_axes_that_cannot_be_met_empties_a_large_space():
    axes = {f"axis{i}": list(range(10)) for i in range(12)}
    space = ConfigSpace(axes, constraints=lambda axis0, axis11: axis0 + axis11 > 18)
    assert space.empty()
    with pytest.raises(ConfigError, match="no configuration of ConfigSpace"):
        space.points()


def test_true_is_not_one():
    assert [config["a"] for config in ConfigSpace({"a": [True, 1]})] == [True, 1]
    assert {"a": 1} not in ConfigSpace({"a": [True, False]})


def test_membership_is_meeting_the_constraints():
    space = ConfigSpace(AXES, constraints=lambda block_q: block_q > 16)
    assert {"block_q": 32, "block_kv": 16, "order": "row"} in space
    assert {"block_q": 16, "block_kv": 16, "order": "row"} not in space
    assert {"block_q": 48, "block_kv": 16, "order": "row"} not in space
    assert "row" not in space


def test_a_list_of_configurations_is_a_space():
    tiles = [Tile(64, 32), Tile(16, 128, 2), Tile(64, 32), Tile(32, 32)]
    space = ConfigSpace.listed(tiles)
    assert [Tile(64, 32), Tile(16, 128, 2), Tile(32, 32)] == list(space)
    assert Tile(64, 128) not in space


def test_listed_returns_the_very_configurations():
    tiles = [Tile(64, 32), Tile(16, 128)]
    assert all(mine is theirs for mine, theirs in zip(tiles, ConfigSpace.listed(tiles), strict=True))


@pytest.mark.parametrize("configurations", [[], [{"a": 1}, {"b": 1}], [{}], [3]])
def test_listed_configurations_must_have_the_same_fields(configurations):
    with pytest.raises(ConfigError, match="configurations must be"):
        ConfigSpace.listed(configurations)


@given(spaces())
def test_a_small_space_is_all_that_meets_the_constraints(made):
    space, allowed = made
    every = [dict(zip(space.names, v, strict=True)) for v in itertools.product(*(axis.values for axis in space.axes))]
    assert [assignment for assignment in every if allowed(assignment)] == list(space)


@given(spaces(), st.integers(0, 2**32), st.integers(0, 40))
def test_samples_meet_the_constraints_and_differ(made, seed, count):
    space, allowed = made
    sample = space.sample(np.random.default_rng(seed), count)
    assert all(map(allowed, sample))
    assert len(sample) == len({space.point(config) for config in sample}) == min(count, len(space))


@given(st.integers(0, 2**32))
@settings(max_examples=10)
def test_samples_depend_only_on_the_generator(seed):
    one, two = (large().sample(np.random.default_rng(seed), 20) for _ in range(2))
    assert one == two


def test_a_large_space_is_sampled_and_not_listed():
    space = large()
    assert space.points() is None
    sample = space.sample(np.random.default_rng(0), 500)
    assert len({tuple(config.values()) for config in sample}) == 500
    assert all(config["axis0"] * config["axis1"] <= 64 for config in sample)


def test_the_size_of_a_large_space_is_estimated():
    exact = 8**10 * sum(a * b <= 64 for a, b in itertools.product([2**i for i in range(8)], repeat=2))
    assert exact / 1.2 < len(large()) < exact * 1.2


def test_tight_constraints_are_followed_where_rejection_is_hopeless():
    axes = {f"axis{i}": list(range(10)) for i in range(10)}
    constraints = [eval(f"lambda axis{i}, axis{i + 1}: axis{i + 1} in (axis{i}, axis{i} + 1)") for i in range(9)]
    space = ConfigSpace({**axes, "free": list(range(10))}, constraints=constraints)
    sample = space.sample(np.random.default_rng(0), 50)
    assert len(sample) == 50
    assert all(config in space for config in sample)


def test_a_space_is_small_up_to_a_number_of_configurations():
    assert ConfigSpace({"a": list(range(ENUMERATED))}).points() is not None
    assert ConfigSpace({"a": list(range(ENUMERATED + 1))}).points() is None


@pytest.mark.parametrize(("count", "is_small"), [(2, False), (3, True), (4, True)])
def test_a_space_has_at_most_as_many_configurations_as_it_has(count, is_small):
    assert ConfigSpace({"a": [1, 2, 3]}).has_at_most(count) is is_small


def test_a_large_space_can_be_walked_a_little():
    assert [config["axis11"] for config in itertools.islice(large(), 3)] == [1, 2, 4]


def test_a_space_is_true_without_being_counted():
    assert ConfigSpace({"a": [1]}, constraints=lambda a: pytest.fail("counted"))


@given(spaces(), st.data())
def test_neighbours_are_valid_differ_on_one_axis_and_are_mutual(made, data):
    space, allowed = made
    config = data.draw(st.sampled_from(list(space)))
    for neighbour in space.neighbours(config):
        assert allowed(neighbour)
        assert sum(a != b for a, b in zip(space.point(config), space.point(neighbour), strict=True)) == 1
        assert config in space.neighbours(neighbour)


def test_adjacent_values_are_the_first_neighbours():
    space = ConfigSpace({"a": [1, 2, 4, 8], "mode": ["x", "y", "z"]})
    neighbours = [tuple(config.values()) for config in space.neighbours({"a": 2, "mode": "z"})]
    assert neighbours == [(1, "z"), (4, "z"), (2, "x"), (2, "y"), (8, "z")]


@given(spaces())
def test_encodings_are_finite_and_tell_configurations_apart(made):
    space, _ = made
    points = space.points()
    columns = np.concatenate([*space.encode(points), np.zeros((len(points), 0))], axis=1)
    assert np.isfinite(columns).all()
    assert columns.min(initial=0.0) >= 0.0
    assert columns.max(initial=1.0) <= 1.0
    assert len(points) == len(np.unique(columns, axis=0))


def encoded(values, **options):
    space = ConfigSpace({"a": values})
    return space.encode([space.point({"a": value}) for value in values], **options)[0]


def test_geometric_values_are_encoded_by_their_logarithm():
    np.testing.assert_allclose(encoded([16, 32, 64, 128, 256]), [[0.0], [0.25], [0.5], [0.75], [1.0]])


def test_other_numbers_are_encoded_linearly():
    np.testing.assert_allclose(encoded([0.0, 0.25, 1.0]), [[0.0], [0.25], [1.0]])


def test_integers_that_round_to_the_same_float_are_encoded_alike():
    np.testing.assert_array_equal(encoded([2**60, 2**60 + 1])[:, 0], [0.0, 0.0])


def test_numbers_that_two_divides_differently_get_a_column_for_it():
    np.testing.assert_allclose(encoded([32, 48, 64, 96])[:, 1], [0.5, 0.0, 1.0, 0.5])
    assert encoded([32, 48, 64, 96], aligned_from=5).shape == (4, 1)


def test_categories_are_equally_far_from_each_other():
    columns = encoded(["row", "column", None])
    distances = {round(math.dist(a, b), 12) for a, b in itertools.combinations(columns.tolist(), 2)}
    assert {1.0} == distances


def test_an_axis_with_one_value_is_not_encoded():
    assert ConfigSpace({"a": [1]}).encode([(0,)]) == []
