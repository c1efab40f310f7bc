# SPDX-License-Identifier: Apache-2.0
"""Configurations that others published: their tier, their reasons, and their place in a search."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from ejkernel.ops.autotuner.tier import AutotuneTier
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.published import PublishedRow, PublishedTable
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.implementation import Implementation, Implementations, OperationCall, OperationConfig
from ejkernel.ops.operation import Operation

CHIP, SOURCE = "tpu:tpu_v5", "tables 1.2, 2026-01-31"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call(OperationCall):
    size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params:
    rows: int = 1


class Table(PublishedTable):
    """Rows set by a test, for calls of size 8 on one chip."""

    def __init__(self, *rows):
        super().__init__("table")
        self.given = rows

    def read(self):
        return {SOURCE: [{"call": {"device": CHIP, "size": 8}, **row} for row in self.given]}


class Fast(Implementation[Call]):
    """At most 100 rows."""

    name = "fast"
    params = Params

    def published_as(self, call):
        return {"size": call.size}

    def params_fault(self, call, params):
        return f"rows must be at most 100, got {params.rows}." if params.rows > 100 else None

    def space(self, call):
        return [Params(rows=2), Params(rows=4)]

    def output(self, call, x, *, params):
        return x + x

    forward = output


class Usual(Fast):
    name = "xla"
    published = None


class Config(OperationConfig):
    pass


class Doubled(Operation[Config, Call, jax.Array]):
    implementations = Implementations({"xla": Usual(), "fast": Fast()})

    def describe(self, x):
        return Call(size=x.shape[0])


KERNEL = Doubled("published_double")


def call_of(size=8, device=CHIP):
    inv = Invocation(kernel=KERNEL, args=(np.ones(size, np.float32),))
    return dataclasses.replace(inv.abstract(), device=device)


@pytest.fixture
def chain_of(tmp_path, monkeypatch):
    """Make a chain whose package has a table with these rows."""

    def make(*rows, **options):
        monkeypatch.setattr(Fast, "published", Table(*rows))
        return ConfigSelectorChain(persistent=PersistentCache(tmp_path, **options))

    return make


def row(rows, us=100.0, xla_us=200.0):
    return {"params": {"rows": rows}, "us": us, "xla_us": xla_us}


def fast(rows):
    return Config(implementation="fast", fwd=Params(rows=rows))


def tier_of(chain, inv, name="published"):
    return {consulted.tier: consulted for consulted in chain.consult(inv, KERNEL)}[name]


def test_an_untuned_call_gets_it_with_its_source(chain_of):
    chain = chain_of(row(64))
    assert chain.resolve(call_of(), KERNEL).config == fast(64)
    assert tier_of(chain, call_of()).note == f"published in {SOURCE}, whose call took 100.0 us, and 200.0 us by XLA"


def test_a_measured_configuration_replaces_it(chain_of):
    chain = chain_of(row(64, us=1.0))
    assert chain.resolve(call_of(), KERNEL).source == "published"
    chain.persistent.put(call_of().key, fast(2))
    assert chain.resolve(call_of(), KERNEL).config == fast(2)


def test_it_ranks_below_all_that_was_measured_and_above_estimates(chain_of):
    asked = [consulted.tier for consulted in chain_of().consult(call_of(), KERNEL)]
    assert asked[-4:] == ["sister", "published", "estimated", "heuristic"]


def test_it_counts_as_a_miss(chain_of):
    assert chain_of(row(64)).resolve(call_of(), KERNEL).tier.is_provisional


@pytest.mark.parametrize(
    "inv", [call_of(size=16), call_of(device="tpu:tpu_v6_lite"), call_of(device="gpu:nvidia_h200")]
)
def test_other_calls_chips_and_platforms_have_none(chain_of, inv):
    assert chain_of(row(64)).resolve(inv, KERNEL).source == "heuristic"


def test_the_row_with_the_largest_gain_comes_first(chain_of):
    found = chain_of(row(4, us=50, xla_us=60), row(64, us=500, xla_us=5000))
    assert found.resolve(call_of(), KERNEL).config == fast(64)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (row(1000), "rows must be at most 100, got 1000."),
        ({"params": {"columns": 4}}, "columns"),
        (row(64, xla_us=105.0), "no gain"),
        ({"params": {"rows": 64}}, "without a comparison with XLA"),
    ],
)
def test_rows_that_do_not_fit_are_skipped_with_a_reason(chain_of, given, reason):
    chain = chain_of(given)
    assert chain.resolve(call_of(), KERNEL).source == "heuristic"
    note = tier_of(chain, call_of()).note
    assert reason in note
    assert SOURCE in note


def test_without_a_comparison_it_still_replaces_the_heuristic_of_its_implementation(chain_of, monkeypatch):
    monkeypatch.setattr(Fast, "preference", lambda self, call: self.name == "fast")
    assert chain_of({"params": {"rows": 64}}).resolve(call_of(), KERNEL).config == fast(64)


def test_a_chain_without_shipped_configurations_has_none(chain_of):
    chain = chain_of(row(64), shipped=False)
    assert chain.resolve(call_of(), KERNEL).source == "heuristic"
    assert tier_of(chain, call_of()).note == "the chain does not use shipped configurations"


def test_a_search_has_it_as_a_candidate_and_tries_it_first(chain_of, monkeypatch):
    chain, given = chain_of(row(64), row(1000)), {}

    class Tuner:
        def tune(self, inv, kernel, *, records=(), **options):
            given["records"] = records
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        AutotuneTier().search(chain, call_of(), KERNEL, Tuner())
    first, *rest = given["records"]
    assert (first.label, first.best) == ("published", [fast(64)])
    assert "published" not in [record.label for record in rest]
    assert fast(64) in KERNEL.config_space(call_of())
    assert fast(1000) not in KERNEL.config_space(call_of())


def test_counts_are_by_source_and_device(chain_of):
    chain_of(row(4), row(64))
    assert list(KERNEL.published_on(CHIP)) == [("fast", SOURCE, 2)]
    assert list(KERNEL.published_on("tpu:tpu_v4")) == []


@pytest.mark.parametrize("times", [{}, {"us": 2.0}, {"xla_us": 2.0}])
def test_without_both_times_a_row_has_no_gain_and_no_comparison(times):
    row = PublishedRow({"rows": 2}, SOURCE, **times)
    assert row.gain == 0
    assert row.note == f"published in {SOURCE}"
    assert row.why_not_untuned == f"published in {SOURCE}, without a comparison with XLA"
