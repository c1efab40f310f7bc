# SPDX-License-Identifier: Apache-2.0
"""How soon a search finds the best of our own kernels' configurations: whole spaces, timed on one H200, are replayed.

`benchmarks/record.py` made the files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.search import Space, record_of, replay

from ejkernel.kernels.flash_attention.mosaic_gpu.params import ForwardParams
from ejkernel.kernels.grouped_matmul.mosaic_gpu.plan import ProductParams, WgradParams
from ejkernel.ops.autotuner.search.strategies import ModelSearch

FILES = sorted((Path(__file__).parents[2] / "recorded_spaces").glob("*.json.gz"))
SPACES = {  # number of configurations, and their types
    "attention_causal_d128": (284, ForwardParams),
    "attention_full_d64": (528, ForwardParams),
    "grouped_matmul_64_groups": (140, ProductParams),
    "grouped_matmul_wgrad_64_groups": (560, WgradParams),
}
SEEDS = range(4)


@pytest.fixture(scope="module")
def spaces():
    return [Space.load(file) for file in FILES]


def best_after(space, evaluations, seed, records=()):
    run = replay(space, lambda declared: ModelSearch(declared, records=records, seed=seed), evaluations)
    return run.curve[-1] / space.optimum


def test_recorded_configurations_are_parameters_of_the_kernel(spaces):
    assert [file.name.partition("__")[0] for file in FILES] == list(SPACES)
    for space, (count, params) in zip(spaces, SPACES.values(), strict=True):
        assert len(space.configurations) == count
        assert np.isfinite(space.times).all()
        for config in space.configurations:
            kept = {n: bool(v) if isinstance(getattr(params(), n), bool) else v for n, v in config.items()}
            assert params(**kept)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(FILES)), ids=[file.name.partition("__")[0] for file in FILES])
def test_a_search_finds_the_best_within_32_measurements(spaces, index):
    assert max(best_after(spaces[index], 32, seed) for seed in SEEDS) <= 1.01


@pytest.mark.slow
def test_records_of_another_shape_speed_up_the_search(spaces):
    causal, full, *_ = spaces
    known = [record_of(full, range(len(full.times)))]
    cold = np.mean([best_after(causal, 8, seed) for seed in SEEDS])
    warm = np.mean([best_after(causal, 8, seed, known) for seed in SEEDS])
    assert warm <= cold
