# SPDX-License-Identifier: Apache-2.0
"""Explanations: the key of a call, the answer of every tier, and the label."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.ops.sample_kernels import Applies, Double, Times

from ejkernel import ops
from ejkernel.modules import FlashAttention, FlashAttentionConfig, flash_attention
from ejkernel.ops import (
    ArgumentError,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    FwdParams,
    Kernel,
    PersistentCache,
    default_executor,
)
from ejkernel.ops.config.shared.exchange import SharedPlace
from ejkernel.ops.errors import CacheWarning, OfflineWarning

X = np.arange(8, dtype=np.float32)


def test_an_explanation_reads_like_this(executor):
    kernel = Times()
    inv = ops.Invocation(kernel=kernel, args=(X,))
    lines = str(executor.explain(kernel, X)).splitlines()
    assert lines == [
        "Times@v0  f32[8]",
        f"  key        {inv.call_key} on {inv.device_fingerprint}",
        "  no answer  override, overlay, memory, autotune",
        "  persistent the chain has no persistent cache",
        "  shipped    the chain does not use shipped configurations",
        "  sister     the chain does not use shipped configurations",
        "  heuristic  1",
        "  devices    no sharding_rule: each device computes the whole call",
        f"  label      ejkernel_ops#Times@v0:{inv.call_key} (its name in the program's text)",
        "  => 1, from heuristic",
    ]


def test_an_explanation_ends_at_the_answer(executor):
    explanation = executor.explain(Times(), X, cfg=3)
    assert ([tier.tier for tier in explanation.tiers], explanation.config, explanation.source) == (
        ["override"],
        3,
        "override",
    )


def test_explaining_remembers_nothing(executor, chain):
    executor.explain(Times(), X)
    assert len(chain.cache) == 0


def test_an_explanation_shows_a_missing_answer(executor):
    class Bare(Kernel[int, jax.Array]):
        def run(self, x, *, cfg):
            return x

    explanation = executor.explain(Bare(), X)
    assert (explanation.config, explanation.source) == (None, None)
    assert str(explanation).splitlines()[-2:] == ["  label      none: the call cannot run", "  => no configuration"]


def test_an_explanation_names_the_command_for_candidates_unless_the_search_is_missing(tmp_path):
    def explained(folder):
        return Executor(ConfigSelectorChain(persistent=PersistentCache(folder, shipped=False))).explain(Times(), X)

    chain = ConfigSelectorChain(persistent=PersistentCache(tmp_path / "tuned", shipped=False))
    inv = ops.Invocation(kernel=Times(), args=(X,))
    chain.search(inv, inv.kernel)
    command = f"ejkernel show --cache {tmp_path / 'tuned'} --log Times:{inv.call_key}"
    assert explained(tmp_path / "tuned").candidates == command
    assert "  candidates ejkernel show" in str(explained(tmp_path / "tuned"))
    PersistentCache(tmp_path / "copied", shipped=False).put(
        inv.key, 2, measured=chain.persistent.load(inv.key).measured
    )
    assert explained(tmp_path / "copied").candidates.startswith("not here: the configuration was copied without")


def test_a_command_for_candidates_in_the_usual_folder_needs_no_cache_option():
    inv = ops.Invocation(kernel=Times(), args=(X,))
    ops.autotune(inv.kernel, X)
    assert default_executor().explain(inv.kernel, X).candidates == f"ejkernel show --log Times:{inv.call_key}"


def test_an_explanation_gives_the_reason_for_a_missing_key(executor):
    explanation = executor.explain(Applies(), X, function=lambda x: x)
    assert (explanation.key, explanation.label, explanation.label_note) == (None, None, "the call has no key")
    assert "has no name that is the same in every process" in str(explanation).splitlines()[1]


def test_an_explanation_says_that_a_result_is_an_input(executor):
    class Identity(Times):
        def run(self, x, *, cfg):
            return x

    assert "each result of the call is one of its inputs" in executor.explain(Identity(), X).label_note


def test_a_static_dtype_is_explained(executor):
    assert executor.explain(Double(), X, note=np.dtype("float32")).label


def test_a_chooser_of_ones_own_is_explained():
    class Always:
        def choose(self, inv, kernel):
            return 3

    explanation = Executor(Always()).explain(Times(), X)
    assert (explanation.source, explanation.config) == ("chooser", 3)


def test_a_function_is_explained_call_by_call_forward_and_backward():
    kernel = Times("times")
    explained = default_executor().explain(jax.value_and_grad(lambda x: kernel(x).sum()), X)
    assert [why.op_id_v for why in explained] == ["times@v0", "times.bwd@v0"]
    assert "times.bwd@v0  f32[8]" in str(explained)


@pytest.mark.slow
def test_a_backward_from_its_forward_shows_the_parameters_that_run():
    x = jnp.ones((1, 16, 2, 8))
    config = FlashAttentionConfig(implementation="xla", fwd=FwdParams(q_blocksize=8, kv_blocksize=8))
    kernel, cache = FlashAttention(), ConfigCache()
    executor = Executor(ConfigSelectorChain(cache))

    def loss(x):
        return executor(kernel, x, x, x, None, None, None, causal=True).sum()

    forward, _ = executor.explain(jax.value_and_grad(loss), x)
    cache.put(forward.key, config)
    _, backward = executor.explain(jax.value_and_grad(loss), x)
    assert (backward.source, backward.config) == ("forward", config)
    assert re.fullmatch(r"implementation=xla bwd\(.*q_blocksize=\d+.*\), from forward", backward.answer)


def test_a_remembered_answer_is_shown_under_the_tier_that_found_it(tmp_path):
    cache = PersistentCache(tmp_path, shipped=False)
    cache.put(ops.Invocation(kernel=Times(), args=(X,)).key, 3)
    executor = Executor(ConfigSelectorChain(persistent=cache))
    executor(Times(), X)
    why = executor.explain(Times(), X)
    assert (why.source, why.tiers[-1].tier) == ("persistent", "persistent")
    assert why.tiers[-1].note.startswith("in memory; saved 20")


def test_static_arguments_of_a_function_stay_static():
    x = jnp.ones((1, 16, 2, 8))
    (why,) = default_executor().explain(flash_attention, x, x, x, causal=True)
    assert why.op_id_v == "flash_attention@v0"


def test_a_function_without_calls_has_no_explanations():
    with pytest.warns(OfflineWarning, match="sin made no call of an operation; there is nothing to explain"):
        found = default_executor().explain(jnp.sin, jnp.ones(3))
    assert str(found) == "no kernel is called"


def test_only_functions_can_be_explained():
    with pytest.raises(ArgumentError, match=r"the first argument must be a kernel or a function, followed by .* got 3"):
        default_executor().explain(3)


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        ({"speedup": 1.5}, r"1\.50x as fast as the heuristic's, measured 20"),
        (None, "saved 20"),
    ],
)
@pytest.mark.parametrize("place", ["own", "other", "bucket", "memory"])
def test_an_explanation_shows_the_file_and_the_measurements_of_an_answer(tmp_path, measured, says, place):
    own, other, bucket = tmp_path / "own", tmp_path / "other", f"file://{tmp_path}/bucket"
    key = ops.Invocation(kernel=Times(), args=(X,)).key
    cache = PersistentCache(own, layers={"other": [other], "bucket": [bucket]}.get(place, []), shipped=False)
    if place == "memory":
        own.write_text("no folder")
        with pytest.warns(CacheWarning, match="cannot be written"):
            cache.put(key, 3, measured=measured)
    else:
        PersistentCache(own if place == "own" else other).put(key, 3, measured=measured)
    if place == "bucket":
        [entry] = [entry for _, entry in PersistentCache(other).entries()]
        SharedPlace(bucket, tmp_path / "copies", may_be_new=True).put([entry])
    answer = Executor(ConfigSelectorChain(persistent=cache)).explain(Times(), X).tiers[-1]
    assert answer.resolution.config == 3
    where = {"own": own, "other": other, "bucket": bucket}.get(place, "memory, not on disk")
    assert re.match(rf"{says}[^;]*; in {re.escape(str(where))}", answer.note)
