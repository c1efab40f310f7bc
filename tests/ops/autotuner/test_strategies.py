# SPDX-License-Identifier: Apache-2.0
"""Search strategies on made-up times: their proposals, the order, and the steps to the best."""

import copy
import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.ops.autotuner.search.gaussian_process import Hyper, Pool, Process, Scale, expected_improvement, matern
from ejkernel.ops.autotuner.search.model import Failing, Model, Prior, RankedPoints, kept_outcomes
from ejkernel.ops.autotuner.search.strategies import (
    ModelSearch,
    Random,
    Record,
    SearchOptions,
    default_strategy,
    seeds_of,
)
from ejkernel.ops.config.spaces.space import ConfigSpace

STRATEGIES = [Random, ModelSearch]

TILES = ConfigSpace(
    {
        "block_q": [16, 32, 64, 128, 256],
        "block_kv": [16, 32, 48, 64, 80, 96, 112, 128],
        "warps": [1, 2, 4, 8],
        "order": ["row", "column"],
    },
    constraints=lambda block_q, block_kv: block_q * block_kv <= 16384,
)


def seconds(config, best=(64, 96, 4)):
    """A bowl in the logarithms, steeper on one axis, with a penalty for unaligned blocks."""
    q, kv, warps = (
        math.log2(config[name]) - math.log2(b) for name, b in zip(("block_q", "block_kv", "warps"), best, strict=False)
    )
    ragged = 0.3 * (config["block_kv"] % 32 != 0) + 0.2 * (config["order"] == "column")
    return 1e-4 * math.exp(0.4 * q**2 + 0.8 * kv**2 + 0.2 * warps**2 + 0.1 * q * warps + ragged)


def search(strategy, measure=seconds, evaluations=10**6, batch=1):
    """Return the measured configurations with their times, in order."""
    asked = []
    while len(asked) < evaluations and (configs := strategy.ask(batch)):
        for config in configs:
            asked.append((config, measure(config)))
            strategy.tell(*asked[-1])
    return asked


def evaluations_to_best(strategy, space=TILES, measure=seconds):
    best = min(t for config in space if (t := measure(config)) is not None)
    return next(i for i, (_, t) in enumerate(search(strategy, measure), 1) if t == best)


def key(config):
    return tuple(config.values())


@st.composite
def small_spaces(draw):
    axes = {f"axis{i}": list(range(1, draw(st.integers(1, 4)) + 1)) for i in range(draw(st.integers(1, 3)))}
    return ConfigSpace(axes)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@given(space=small_spaces(), batch=st.integers(1, 5), failing=st.integers(1, 5), seed=st.integers(0, 99))
@settings(max_examples=25)
def test_every_configuration_is_proposed_once_and_then_no_more(strategy, space, batch, failing, seed):
    rng = np.random.default_rng(seed)
    searcher = strategy(space)
    asked = search(
        searcher, lambda config: None if rng.integers(failing) == 0 else float(rng.random() + 0.1), batch=batch
    )
    assert sorted(key(config) for config in space) == sorted(key(config) for config, _ in asked)
    assert not searcher.ask(3)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_whole_space_of_failures_is_gone_through(strategy):
    assert len(search(strategy(TILES), lambda config: None, evaluations=40)) == 40


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_seeds_come_first_and_in_order(strategy):
    seeds = [{"block_q": q, "block_kv": 32, "warps": 2, "order": "row"} for q in (128, 16, 64)]
    searcher = strategy(TILES, seeds=[*seeds, seeds[0]])
    assert seeds == searcher.ask(2) + searcher.ask(1)
    assert seeds[0] not in [config for config, _ in search(searcher, evaluations=30)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_seeds_outside_the_space_are_left_out(strategy):
    outside = {"block_q": 256, "block_kv": 128, "warps": 2, "order": "row"}
    assert [outside] != strategy(TILES, seeds=[outside]).ask(1)


def test_records_come_before_seeds_in_turns():
    a, b, c, d = ({"block_q": q, "block_kv": 32, "warps": 2, "order": "row"} for q in (16, 32, 64, 128))
    records = [Record("same call, other device", ((a, 2.0), (b, 1.0), (c, None))), Record("next shape", ((c, 1.0),))]
    assert [b, c, d] == seeds_of(records, [d])
    assert [b, c, d] == ModelSearch(TILES, seeds=[d], records=records).ask(3)


def test_the_best_of_a_record_has_a_time():
    assert Record("here", ((1, 3.0), (2, 2.0), (5, 2.0), (3, None), (4, math.nan))).best == [2]
    assert Record("here", ((3, None),)).best == []


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("strategy", [Random, ModelSearch])
def test_a_seed_makes_the_same_search(strategy, batch):
    runs = [search(strategy(TILES, seed=7), evaluations=24, batch=batch) for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("strategy", [Random, ModelSearch])
def test_other_seeds_make_other_searches(strategy):
    assert search(strategy(TILES, seed=1), evaluations=8) != search(strategy(TILES, seed=2), evaluations=8)


def test_a_search_depends_on_ratios_of_times_and_not_on_their_unit():
    runs = [search(ModelSearch(TILES), lambda c, u=unit: u * seconds(c), evaluations=30) for unit in (1.0, 2.0**20)]
    assert [config for config, _ in runs[0]] == [config for config, _ in runs[1]]


@pytest.mark.slow
def test_the_model_finds_the_best_much_sooner_than_chance():
    model = np.mean([evaluations_to_best(ModelSearch(TILES, seed=seed)) for seed in range(2)])
    chance = np.mean([evaluations_to_best(Random(TILES, seed=seed)) for seed in range(40)])
    assert 4 * model < chance


@pytest.mark.slow
def test_the_model_learns_where_configurations_fail():
    def measure(config):
        return None if config["warps"] == 1 or config["order"] == "column" else seconds(config)

    # Until the best is found. Later, only configurations not known to fail remain.
    searches = [search(ModelSearch(TILES, seed=seed), measure, evaluations=20) for seed in range(3)]
    usual = np.mean([measure(config) is None for config in TILES])
    assert np.mean([t is None for asked in searches for _, t in asked[10:15]]) < usual / 2
    best = min(t for config in TILES if (t := measure(config)) is not None)
    assert all(best in [t for _, t in asked] for asked in searches)


def test_what_failed_in_the_records_works_less_likely():
    points = TILES.points()
    both, one = (TILES.config(points[i]) for i in (0, 1))
    times = tuple((config, seconds(config)) for config in list(TILES)[2:9])
    records = [Record("a", (*times, (both, None), (one, None))), Record("b", (*times, (both, None)))]
    options = SearchOptions()
    chance = RankedPoints(TILES, points, [Prior(TILES, record, options) for record in records], options).chance
    assert list(chance[:3]) == pytest.approx([0.1, 0.55, 1.0])


@pytest.mark.slow
def test_a_promising_region_that_fails_does_not_hide_the_best_of_the_rest():
    def measure(config):
        return None if config["block_q"] * config["warps"] > 128 or config["order"] == "column" else seconds(config)

    model = np.mean([evaluations_to_best(ModelSearch(TILES, seed=seed), measure=measure) for seed in range(2)])
    chance = np.mean([evaluations_to_best(Random(TILES, seed=seed), measure=measure) for seed in range(40)])
    assert 2 * model < chance


@pytest.mark.slow
def test_a_record_of_a_like_device_leads_to_the_best_at_once():
    record = Record("like", tuple((config, 3 * seconds(config)) for config in TILES))
    assert evaluations_to_best(ModelSearch(TILES, records=[record])) == 1


@pytest.mark.slow
def test_before_the_first_time_the_fastest_of_a_record_are_proposed():
    record = Record("like", tuple((config, seconds(config)) for config in TILES))
    strategy = ModelSearch(TILES, records=[record])
    assert sorted(map(seconds, strategy.ask(8))) == sorted(map(seconds, TILES))[:8]
    for config in strategy.ask(8):
        strategy.tell(config, None)
    assert len(strategy.ask(8)) == 8


def test_a_record_with_gaps_still_helps():
    record = Record("like", tuple((c, seconds(c)) for c in list(TILES)[::7] if c["block_kv"] != 96))
    warm = [evaluations_to_best(ModelSearch(TILES, records=[record], seed=seed)) for seed in range(2)]
    assert max(warm) <= 10


@pytest.mark.slow
def test_a_misleading_record_is_dropped():
    like = Record("like", tuple((c, seconds(c, best=(64, 64, 4))) for c in TILES))
    misleading = Record("misleading", tuple((c, 1e-8 / seconds(c)) for c in TILES))
    assert evaluations_to_best(ModelSearch(TILES, records=[misleading, like])) <= 20
    assert evaluations_to_best(ModelSearch(TILES, records=[misleading])) <= 40


@pytest.mark.slow
def test_a_record_that_knows_only_another_optimum_does_not_hold_the_search_there():
    """The optimum of the record is nearly as good here, but the best is far from it, where the record is slow."""

    def measure(config):
        return min(1.3 * seconds(config, best=(256, 16, 1)), seconds(config, best=(16, 112, 8)))

    record = Record("elsewhere", tuple((config, seconds(config, best=(256, 16, 1))) for config in TILES))
    assert evaluations_to_best(ModelSearch(TILES, records=[record]), measure=measure) <= 30


def test_a_model_believes_records_less_the_longer_nothing_better_is_found():
    candidates = RankedPoints(TILES, TILES.points(), priors_of_a_bowl(), SearchOptions())
    columns = candidates.pool.columns.shape[1]
    hypers = [Hyper.start(columns, records=records, additive=0.2) for records in (True, False)]
    model = Model(candidates, hypers, {})
    believed = [model.weights(waited) for waited in (0, 10, 100)]
    assert believed[0] == [1.0, 0.0]
    assert believed[0][0] > believed[1][0] > believed[2][0] > 0.0
    assert all(sum(weights) == pytest.approx(1.0) for weights in believed)


def priors_of_a_bowl():
    record = Record("like", tuple((config, seconds(config)) for config in TILES))
    return [Prior(TILES, record, SearchOptions())]


def test_records_outside_the_space_are_ignored():
    other = Record("other", tuple(({"block_q": i, "block_kv": 7, "warps": 1, "order": "row"}, 1.0) for i in range(9)))
    assert search(ModelSearch(TILES), evaluations=9) == search(ModelSearch(TILES, records=[other]), evaluations=9)


def test_an_unrequested_configuration_may_be_reported():
    reported = {"block_q": 64, "block_kv": 64, "warps": 4, "order": "row"}
    searcher = ModelSearch(TILES)
    searcher.tell(reported, seconds(reported))
    assert reported not in [config for config, _ in search(searcher, evaluations=40)]


def test_the_time_of_a_configuration_outside_the_space_is_taken_note_of():
    searcher = ModelSearch(TILES)
    searcher.tell({"block_q": 3}, 1e-9)
    assert len(search(searcher, evaluations=20)) == 20


@pytest.mark.parametrize("time", [math.nan, math.inf, 0.0, -1.0])
def test_an_invalid_time_is_a_failure(time):
    searcher = ModelSearch(TILES)
    asked = search(searcher, lambda config: time, evaluations=12)
    assert len({key(config) for config, _ in asked}) == 12
    assert {None} == set(searcher.times.values())


def test_configurations_may_be_reported_in_another_order_and_more_than_once():
    searcher = ModelSearch(TILES)
    for _ in range(6):
        configs = searcher.ask(4)
        for config in [*reversed(configs), configs[0]]:
            searcher.tell(config, seconds(config))
    assert len(searcher.times) == 24


def test_configurations_under_measurement_are_not_proposed_again():
    searcher = ModelSearch(TILES)
    search(searcher, evaluations=10)
    pending = [searcher.ask(1)[0] for _ in range(10)]
    assert len({key(config) for config in pending}) == 10


@pytest.mark.slow
def test_a_large_space_is_searched_without_being_listed():
    @dataclasses.dataclass(frozen=True)
    class Config:
        a: int
        b: int
        c: int
        d: int
        e: int
        f: int
        g: int

    names = [field.name for field in dataclasses.fields(Config)]
    space = ConfigSpace(
        {name: [2**i for i in range(8)] for name in names}, constraints=lambda a, b: a != b, build=Config
    )

    def measure(config):
        return math.exp(sum((math.log2(getattr(config, name)) - i) ** 2 for i, name in enumerate(names)) / 10)

    model = min(t for _, t in search(ModelSearch(space, seed=0), measure, evaluations=40))
    chance = min(t for _, t in search(Random(space, seed=0), measure, evaluations=600))
    assert model < chance


def test_a_space_of_few_axes_is_searched_with_a_model():
    assert isinstance(default_strategy(TILES), ModelSearch)


def process_of(values, rows, additive=0.3):
    rng = np.random.default_rng(0)
    pool = Pool([rng.random((30, 2)), rng.random((30, 1))], rng.normal(size=(2, 30)))
    hyper = Hyper.start(3, records=True, additive=additive)
    return pool, hyper, Process(pool, hyper, rows)


def test_adding_measurements_one_by_one_is_the_same_as_all_at_once():
    values, scale = np.linspace(-1, 1, 8), Scale(1.0, 1.0)
    _, _, whole = process_of(values, range(8))
    _, _, stepwise = process_of(values, range(3))
    for row in range(3, 8):
        stepwise.add(row)
    for one, two in zip(whole.predict(values, scale), stepwise.predict(values, scale), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-12)


def test_measurements_of_a_copy_stay_there():
    values, scale = np.linspace(-1, 1, 8), Scale(1.0, 1.0)
    _, _, process = process_of(values, range(5))
    before = process.predict(values[:5], scale)
    other = copy.copy(process)
    for row in range(29, 5, -1):
        other.add(row)
    np.testing.assert_array_equal(before, process.predict(values[:5], scale))
    for row in range(5, 8):
        process.add(row)
    _, _, whole = process_of(values, range(8))
    np.testing.assert_allclose(process.predict(values, scale), whole.predict(values, scale), rtol=1e-7, atol=1e-9)


def test_predictions_are_those_of_a_process_with_an_unknown_constant():
    values, scale = np.array([0.2, -0.5, 1.0, 0.4, -0.1]), Scale(0.7, 2.0)
    pool, hyper, process = process_of(values, range(5))
    mean, deviation = process.predict(values, scale)
    whole, noise = pool.covariance(hyper, np.arange(pool.size)), (hyper.noise + 1e-8) * np.eye(5)
    known = whole[:5]
    constant = 10.0  # the covariance of any two values that a constant of precision 0.1 adds
    start = pool.mean + (values - pool.mean[:5]).mean()
    weights = np.linalg.solve(known[:, :5] + noise + constant, values - start[:5])
    np.testing.assert_allclose(mean, start + weights @ (known + constant), rtol=1e-6)
    variance = np.diag(whole) - (known * np.linalg.solve(known[:, :5] + noise, known)).sum(axis=0)
    squares = float(weights @ (values - start[:5]))
    np.testing.assert_allclose(deviation**2, variance * scale.posterior(squares, 5), rtol=1e-6)


def test_a_fit_does_not_make_the_measurements_less_likely():
    rng = np.random.default_rng(1)
    pool = Pool([rng.random((40, 1)), rng.random((40, 1))], np.zeros((0, 40)))
    values = np.sin(9 * pool.columns[:, 0])
    start = Hyper.start(2, records=False, additive=0.2)
    fitted = pool.fit(start, np.arange(40), values, Scale(1.0, 1.0))
    assert fitted.scales[0] < fitted.scales[1]  # the values vary along the first axis alone


def test_a_fit_tries_each_share_of_the_covariance_alone():
    start = Hyper.start(2, records=True, additive=0.2)
    changed = [[own != first for own, first in zip(step.parts, start.parts, strict=True)] for step in start.nearby()]
    assert all(changed.count([i == part for i in range(3)]) == 2 for part in range(3))


def test_the_covariance_falls_from_one_with_the_distance():
    covariance = matern(np.array([0.0, 0.1, 1.0, 4.0]))
    assert covariance[0] == 1.0
    assert (np.diff(covariance) < 0).all()


def test_expected_improvement_is_that_of_many_draws():
    rng = np.random.default_rng(0)
    draws = 0.5 + 0.7 * rng.normal(size=1_000_000)
    found = expected_improvement(0.3, np.array([0.5]), np.array([0.7]))[0]
    assert found == pytest.approx(np.maximum(0.3 - draws, 0).mean(), rel=5e-3)


BLOCKS = ConfigSpace(
    {
        "q": [16, 32, 64, 128, 256],
        "kv": [16, 32, 64, 128, 256],
        "stages": [1, 2, 3, 4],
        "order": ["row", "column", "auto"],
        "split": [1, 2, 4],
    }
)
TEMPTING = {
    "value": lambda config: config["stages"] == 4,
    "pair": lambda config: config["q"] >= 128 and config["order"] != "row",
    "product": lambda config: config["q"] * config["kv"] * config["stages"] > 2**16,
}


@pytest.mark.slow
@pytest.mark.parametrize("fails", TEMPTING.values(), ids=TEMPTING)
def test_failing_regions_are_avoided_despite_good_predictions(fails):
    """The larger the blocks, the faster; the largest fail."""

    def measure(config):
        work = math.log2(config["q"] * config["kv"] * config["stages"])
        return None if fails(config) else math.exp(-0.3 * work + 0.1 * config["split"])

    asked = search(ModelSearch(BLOCKS, seed=0), measure, evaluations=40)
    assert np.mean([time is None for _, time in asked]) < 0.48
    assert min(t for _, t in asked if t is not None) == min(t for c in BLOCKS if (t := measure(c)) is not None)


def test_without_failures_everything_is_taken_to_work():
    pool = Pool([np.linspace(0, 1, 9)[:, None]], np.zeros((0, 9)))
    failing = Failing(pool, [0, 4], [False, False], None)
    np.testing.assert_array_equal(failing.chance(), np.ones(9))


def test_the_probability_of_success_falls_near_failures():
    pool = Pool([np.linspace(0, 1, 9)[:, None]], np.zeros((0, 9)))
    failing = Failing(pool, [0, 2, 6, 8], [False, False, True, True], None)
    before = failing.chance()
    assert before[1] > 0.5 > before[7] > 0.0
    failing.add(5, failed=True)
    assert failing.chance()[5] < before[5]


def test_more_outcomes_than_a_model_holds_are_those_of_the_rarer_kind_and_the_latest():
    kept = kept_outcomes([i % 100 == 0 for i in range(1000)], 256)
    assert len(kept) == 256
    assert set(range(0, 1000, 100)) <= set(kept)
    assert kept_outcomes([True] * 1000, 256) == list(range(744, 1000))
    assert kept_outcomes([True, False] * 6, 6) == [6, 7, 8, 9, 10, 11]
