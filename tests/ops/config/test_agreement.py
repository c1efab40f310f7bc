# SPDX-License-Identifier: Apache-2.0
"""Agreement of processes. The tests simulate the ranks in this process, with a shared store."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tests.ops.sample_kernels import ShowsConfig, Times

from ejkernel import compat
from ejkernel.compat.processes import CoordinationStore
from ejkernel.ops import (
    AgreementError,
    AgreementWarning,
    ArgumentError,
    AutotunePolicy,
    CacheWarning,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    NoConfigError,
    PersistentCache,
    TuningWarning,
    bucketed,
    configuration_digest,
    overlay_cache,
    policy_override,
    stable_json,
)
from ejkernel.ops.config.agreement import agreement
from ejkernel.ops.config.agreement.decisions import Book


class Client:
    """A fake of JAX's coordination client, which only holds these values."""

    def __init__(self, values):
        self.values = values

    def key_value_set(self, key, value, allow_overwrite=False):
        if key in self.values and not allow_overwrite:
            raise RuntimeError(f"ALREADY_EXISTS: key {key} already exists.")
        self.values[key] = value

    def key_value_try_get(self, key):
        if key not in self.values:
            raise RuntimeError(f"NOT_FOUND: Config key {key} not found.")
        return self.values[key]

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in self.values.items() if key.startswith(folder)]


class Rank(contextlib.AbstractContextManager):
    """A process: its caches and its known decisions."""

    def __init__(self, ranks, index, **chain):
        self.ranks, self.index = ranks, index
        self.chain = ConfigSelectorChain(**chain)
        self.executor = Executor(self.chain)
        self.store = CoordinationStore(Client(ranks.values))
        with self:
            self.book = Book(self.store)

    def __enter__(self):
        self.before, self.ranks.now = self.ranks.now, self
        return self

        return self

    def __exit__(self, *error):
        self.ranks.now = self.before

    def program(self, kernel):
        return jax.jit(lambda x: self.executor(kernel, x))

    def run(self, kernel, x):
        """Lower and run in a separate program; return the configuration visible in the result."""
        with self:
            return int(np.asarray(self.program(kernel)(x)).ravel()[0])

    def resolution(self, kernel, x):
        with self:
            return self.executor.explain(self.program(kernel), x)[0].resolution


class Ranks:
    """Two processes, and more if they are asked for."""

    def __init__(self):
        self.values, self.now, self.made, self.timers = {}, None, {}, []

    def __getitem__(self, index):
        return self.made.get(index) or self.made.setdefault(index, Rank(self, index))

    def __setitem__(self, index, chain):
        self.made[index] = Rank(self, index, **chain)


@pytest.fixture
def ranks(monkeypatch):
    found = Ranks()
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def start(timer):
        found.timers.append(timer)

    monkeypatch.setattr(threading.Timer, "start", start)
    monkeypatch.setattr(jax, "process_index", lambda: found.now.index)
    monkeypatch.setattr(compat.processes, "coordination_store", lambda: found.now.store)
    monkeypatch.setattr(agreement, "current_book", lambda: found.now.book)
    monkeypatch.setattr("ejkernel.ops.config.agreement.decisions.current_book", lambda: found.now.book)
    return found


@pytest.fixture(scope="module")
def x():
    """An array on two devices, in a program that does not name its devices."""
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    return jax.device_put(jnp.ones((2, 2)), NamedSharding(mesh, PartitionSpec("a")))


@pytest.fixture
def kernel():
    return Times("times")


def key_of(kernel, x):
    return Invocation(kernel=kernel, args=(x,)).key


# --- the deciding process ---


def test_the_first_process_to_lower_decides_despite_other_caches(ranks, kernel, x):
    ranks[1].chain.cache.put(key_of(kernel, x), 7)
    assert [ranks[1].run(kernel, x), ranks[0].run(kernel, x)] == [7, 7]


def test_explain_names_the_process_that_decided(ranks, kernel, x):
    ranks[1].run(kernel, x)
    with ranks[0]:
        why = ranks[0].executor.explain(ranks[0].program(kernel), x)[0]
    assert (why.config, why.source) == (1, "agreed with process 1")
    assert [tier.tier for tier in why.tiers] == ["override", "overlay", "agreed"]
    assert "agreed     1  (process 1 took it from its heuristic tier)" in str(why)


def test_explain_decides_nothing(ranks, kernel, x):
    with ranks[0]:
        why = ranks[0].executor.explain(ranks[0].program(kernel), x)[0]
    assert (why.source, ranks.values) == ("heuristic", {})
    assert ("agreed", "the first process that lowers the call decides") in [(t.tier, t.note) for t in why.tiers]


def test_a_decision_stays_despite_later_puts_or_tuning(ranks, kernel, x):
    ranks[0].run(kernel, x)
    for rank in (ranks[0], ranks[1]):
        rank.chain.cache.put(key_of(kernel, x), 5)
        assert rank.run(kernel, x) == 1


def test_a_process_reads_a_decision_once(ranks, kernel, x):
    ranks[0].run(kernel, x)
    ranks[1].run(kernel, x)
    ranks.values.clear()
    assert ranks[1].run(kernel, x) == 1


def test_calls_of_a_bare_chooser_are_agreed_on_too(ranks, kernel, x):
    class Sevens:
        def choose(self, inv, kernel):
            return 7

    ranks[0].executor = Executor(Sevens())
    assert [ranks[0].run(kernel, x), ranks[1].run(kernel, x)] == [7, 7]


def test_gradients_are_agreed_on_apart_from_their_forward(ranks, x):
    kernel = ShowsConfig("shown")

    def gradient(rank):
        with rank:
            return float(jax.jit(jax.grad(lambda x: rank.executor(kernel, x)))(x)[0, 0])

    forward = key_of(kernel, x)
    for rank, config in ((ranks[0], 3), (ranks[1], 4)):
        rank.chain.cache.put(forward._replace(op="shown.bwd@v0"), config)
        rank.chain.cache.put(forward, config)
    ranks[1].run(kernel, x)
    assert [gradient(ranks[0]), gradient(ranks[1])] == [103, 103]
    assert ranks[0].run(kernel, x) == 4


def test_calls_of_a_bucket_are_agreed_on_one_by_one(ranks, x):
    class Bucketed(Times):
        def heuristic_cfg(self, inv):
            return inv.args[0].shape[0]

        def bucket(self, inv):
            return (bucketed(inv.abstract_args[0], 0, least=8),), {}

    kernel, longer = Bucketed("bucketed"), jax.device_put(jnp.ones((4, 2)), x.sharding)
    assert [ranks[0].run(kernel, x), ranks[1].run(kernel, longer), ranks[1].run(kernel, x)] == [2, 4, 2]


def test_processes_with_other_devices_agree(ranks, kernel, x, monkeypatch):
    ranks[0].run(kernel, x)
    monkeypatch.setattr("ejkernel.ops.core.invocation.platform_fingerprint", lambda platform: "cpu:another_x3")
    ranks[1].chain.cache.put(key_of(kernel, x)._replace(device="cpu:another_x3"), 7)
    assert ranks[1].run(kernel, x) == 1


def test_a_program_on_one_device_needs_no_agreement(ranks, kernel):
    one = jnp.ones(2)
    ranks[1].chain.cache.put(key_of(kernel, one), 7)
    assert [ranks[0].run(kernel, one), ranks[1].run(kernel, one), ranks.values] == [1, 7, {}]


def test_a_program_with_a_mesh_of_one_process_needs_no_agreement(ranks, kernel, x):
    rank, mesh = ranks[0], x.sharding.mesh
    local = jax.shard_map(
        lambda x: rank.executor(kernel, x), mesh=mesh, in_specs=PartitionSpec("a"), out_specs=PartitionSpec("a")
    )
    with rank:
        jax.jit(local)(x)
    assert ranks.values == {}


def test_a_program_of_one_process_can_be_exempted(ranks, kernel, x):
    with policy_override(agree=False):
        ranks[0].run(kernel, x)
    assert ranks.values == {}


def test_compile_chooses_one_configuration_for_all(ranks, kernel, x):
    ranks[1].chain.cache.put(key_of(kernel, x), 7)
    for rank in (ranks[1], ranks[0]):
        with rank:
            assert int(rank.executor.compile(kernel, x)(x)[0, 0]) == 7


def test_a_directly_differentiated_kernel_has_an_agreed_configuration(ranks, x):
    class Prints(Times):
        def run(self, x, *, cfg):
            jax.debug.callback(lambda: None)
            return cfg * x

    kernel = Prints("prints")
    ranks[1].chain.cache.put(key_of(kernel, x), 7)

    def gradient(rank):
        with rank:
            return float(jax.jit(jax.grad(lambda x: rank.executor(kernel, x).sum()))(x)[0, 0])

    assert [gradient(ranks[1]), gradient(ranks[0])] == [7, 7]


# --- misses ---


def test_nothing_is_tuned_while_others_would_wait(ranks, kernel, x):
    ranks[0] = {"autotune": True}
    with pytest.warns(TuningWarning, match=r"times: not tuned on a miss, because several processes run"):
        assert ranks[0].run(kernel, x) == 1


def test_a_process_without_heuristic_uses_the_decision_of_another(ranks, kernel, x):
    ranks[0] = {"policy": AutotunePolicy(heuristic=False)}
    with pytest.raises(NoConfigError):
        ranks[0].run(kernel, x)
    ranks[1].run(kernel, x)
    assert ranks[0].run(kernel, x) == 1


# --- overlays ---


def test_the_same_overlay_in_all_processes_has_a_separate_decision(ranks, kernel, x):
    key, seen = key_of(kernel, x), []
    for overlay in ({}, {key: 3}, {}, {key: 4}):
        for rank in (ranks[0], ranks[1], ranks[0]):
            with overlay_cache(overlay):
                seen.append(rank.run(kernel, x))
    assert seen == [1] * 3 + [3] * 3 + [1] * 3 + [4] * 3


@pytest.mark.parametrize("first", [0, 1])
def test_an_overlay_in_one_process_only_is_an_error_that_names_key_and_overlays(ranks, kernel, x, first):
    key = key_of(kernel, x)

    def run(index):
        with overlay_cache({key: 3} if index else {}):
            return ranks[index].run(kernel, x)

    run(first)
    with pytest.raises(AgreementError) as failure:
        run(1 - first)
    text = str(failure.value)
    assert f"times@v0:{key.call}" in text
    assert "3 (from overlay " in text
    assert "1 (from no overlay)" in text
    assert f"process {first} runs this call" in text


def test_different_overlays_are_an_error_even_for_a_decided_call(ranks, kernel, x):
    key = key_of(kernel, x)
    for rank in (ranks[0], ranks[1]):
        rank.run(kernel, x)
    with overlay_cache({key: 3}):
        ranks[0].run(kernel, x)
    with (
        overlay_cache({key: 4}),
        pytest.raises(AgreementError, match=r"with 3 \(from overlay .* use 4 \(from overlay"),
    ):
        ranks[1].run(kernel, x)


def test_the_first_process_in_an_overlay_logs_the_processes_that_do_not_follow(ranks, kernel, x, caplog):
    for rank in (ranks[0], ranks[1]):
        rank.run(kernel, x)
    with overlay_cache({key_of(kernel, x): 3}):
        ranks[0].run(kernel, x)
        (timer,) = ranks.timers
        with ranks[0]:
            timer.function(*timer.args)
        assert "process 0 has run it with 3 (from overlay" in caplog.text
        assert caplog.text.endswith("but these processes have not: 1\n")
        caplog.clear()
        ranks[1].run(kernel, x)
    with ranks[0]:
        timer.function(*timer.args)
    assert caplog.text == ""


def test_overlays_that_speak_of_other_calls_do_not_matter(ranks, kernel, x):
    key = key_of(kernel, x)
    with overlay_cache({key._replace(call="0" * 16): 3}):
        assert ranks[0].run(kernel, x) == 1
    assert ranks[1].run(kernel, x) == 1


def test_an_overlay_with_the_decided_configuration_is_no_error(ranks, kernel, x):
    ranks[0].run(kernel, x)
    with overlay_cache({key_of(kernel, x): 1}):
        assert ranks[1].run(kernel, x) == 1


def test_a_call_with_its_own_configuration_keeps_it(ranks, kernel, x):
    ranks[0].run(kernel, x)
    with ranks[1]:
        assert int(jax.jit(lambda x: ranks[1].executor(kernel, x, cfg=9))(x)[0, 0]) == 9


# --- configurations that cannot be shared ---


@dataclasses.dataclass(frozen=True)
class Config:
    factor: int


class Typed(Kernel[Config, jax.Array]):
    def run(self, x, *, cfg):
        if cfg.factor == 13:
            raise RuntimeError("13 is not for this machine")
        return cfg.factor * x

    def heuristic_cfg(self, inv):
        return Config(1)


def test_a_configuration_with_fields_that_a_process_does_not_know_is_an_error(ranks, x):
    typed = Typed("typed")
    ranks[0].run(typed, x)
    decided = next(name for name in ranks.values if name.startswith("ejkernel/decided/"))
    newer = dataclasses.replace(ranks[0].book.find(decided.split("/")[2]), config={"factor": 1, "newer": 2})
    ranks.values[decided] = stable_json(newer)
    with pytest.raises(
        AgreementError, match=r"process 0 decided for all processes cannot be used .*newer.*same version"
    ):
        ranks[1].run(typed, x)


def test_a_decision_of_another_form_is_an_error(ranks, kernel, x):
    ranks[0].run(kernel, x)
    for name in ranks.values:
        ranks.values[name] = ranks.values[name].replace('"schema":1', '"schema":2')
    with pytest.raises(AgreementError, match=r"cannot be read: it was written by a newer ejkernel"):
        ranks[1].run(kernel, x)


def test_a_configuration_that_does_not_run_on_this_device_is_an_error(ranks, x, monkeypatch):
    typed = Typed("typed")
    ranks[0].chain.cache.put(key_of(typed, x), Config(12))
    ranks[0].run(typed, x)
    monkeypatch.setattr(Typed, "run", lambda self, x, *, cfg: [None, x][cfg.factor])
    with pytest.raises(AgreementError, match=r"Config\(factor=12\) .*agreed with process 0\) does not run here: Index"):
        ranks[1].run(typed, x)


def test_a_saved_configuration_that_does_not_run_is_not_decided(ranks, x, tmp_path):
    typed = Typed("typed")
    saved = PersistentCache(tmp_path, shipped=False)
    saved.put(key_of(typed, x), Config(13))
    ranks[0] = {"persistent": saved}
    with pytest.warns(CacheWarning, match="13 is not for this machine"):
        assert ranks[0].run(typed, x) == 1
    assert ranks[1].run(typed, x) == 1


def test_a_configuration_without_a_data_form_is_an_error(ranks, kernel, x):
    class Odd(Times):
        def heuristic_cfg(self, inv):
            return np.ones(())

    with pytest.raises(AgreementError, match=r"cannot be sent to the other processes: \$: .*plain data, or pass cfg="):
        ranks[0].run(Odd("odd"), x)


def test_a_call_without_a_key_runs_with_its_heuristic_in_every_process(ranks, x):
    class Called(Times):
        def run(self, x, f, *, cfg):
            return f(cfg * x)

    called = Called("called")
    with ranks[0], pytest.warns(UserWarning, match="cannot be cached"):
        jax.jit(lambda x: ranks[0].executor(called, x, lambda y: y))(x)
    assert ranks.values == {}


# --- the service ---


def test_a_service_that_fails_is_an_error_that_names_it(ranks, kernel, x, monkeypatch):
    def fails(self, *_, **__):
        raise RuntimeError("UNAVAILABLE: the leader died")

    monkeypatch.setattr(Client, "key_value_try_get", fails)
    with pytest.raises(AgreementError, match=r"JAX's coordination service \(in process 0\) failed: UNAVAILABLE"):
        ranks[0].run(kernel, x)


def test_a_service_that_does_not_answer_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(CoordinationStore, "_work", lambda self: None)
    monkeypatch.setattr(CoordinationStore, "patience_s", 0.001)
    with pytest.raises(ConnectionError, match=r"no answer for 0\.001 s"):
        CoordinationStore(Client({})).get("key")


def test_without_a_service_each_process_chooses_with_a_warning(ranks, kernel, x, monkeypatch):
    def missing():
        raise LookupError("jax.distributed.initialize() was not called")

    monkeypatch.setattr(agreement, "current_book", missing)
    with pytest.warns(AgreementWarning, match=r"cannot agree .*initialize\(\) was not called"):
        assert ranks[0].run(kernel, x) == 1


def test_a_jax_without_the_store_is_distinguished_from_a_missing_service(monkeypatch):
    from jax._src import distributed

    with pytest.raises(LookupError, match=r"initialize\(\) was not called"):
        compat.processes.coordination_store()
    monkeypatch.setattr(distributed.global_state, "client", object())
    with pytest.raises(LookupError, match=r"of JAX .* has no key_value_set"):
        compat.processes.coordination_store()
    monkeypatch.delattr(distributed, "global_state")
    with pytest.raises(LookupError, match="has no coordination service where it was"):
        compat.processes.coordination_store()


# --- comparing ---


def test_digests_are_equal_once_the_same_was_run(ranks, kernel, x):
    ranks[0].run(kernel, x)
    with ranks[0]:
        mine, other = configuration_digest(), configuration_digest(1)
        assert (mine == other, list(mine.difference(other).values())) == (False, [(*mine.keys.values(), ())])
    ranks[1].run(kernel, x)
    with ranks[1]:
        assert str(configuration_digest()) == str(configuration_digest(0)) == str(mine)
        assert configuration_digest().difference(mine) == {}


def test_a_difference_names_the_call_and_its_configurations(ranks, kernel, x):
    for index, config in ((0, 2), (1, 3)):
        with ranks[index] as rank:
            jax.jit(functools.partial(rank.executor, kernel, cfg=config))(x)
    with ranks[0]:
        (call, (mine, theirs)), *rest = configuration_digest().difference(configuration_digest(1)).items()
    assert call == f"times@v0:{key_of(kernel, x).call} on cpu, 2 partitioned devices"
    assert (rest, len(mine), len(theirs), mine == theirs) == ([], 1, 1, False)


def test_a_process_without_others_has_used_nothing():
    assert configuration_digest().keys == {}
    with pytest.raises(AgreementError, match=r"process must be None, got 1: jax\.distributed\.initialize"):
        configuration_digest(1)


def test_difference_requires_a_digest(ranks):
    with ranks[0], pytest.raises(ArgumentError, match="other must be a ConfigurationDigest"):
        configuration_digest().difference("0123456789abcdef")
    with ranks[0], pytest.raises(ArgumentError, match="process must be the index"):
        configuration_digest("1")


def test_the_processes_of_known_devices_are_part_of_a_calls_name(kernel, x):
    inv = Invocation(kernel=kernel, args=(x,), span=compat.processes.Span(4, (0, 1, 2, 3)))
    assert agreement.call_name(inv).endswith("on cpu, 4 devices of processes 0-3")
    some = dataclasses.replace(inv, span=compat.processes.Span(2, (1, 5)))
    assert " of 2 processes (" in agreement.call_name(some)
    assert agreement.call_name(dataclasses.replace(inv, span=compat.processes.Span(0))).endswith(", any devices")


def test_an_abstract_mesh_has_only_a_number_of_devices(ranks):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stands_for_others",))
    context = types.SimpleNamespace(mesh=mesh)
    assert compat.processes.span_of_context(context, partitioned=False) is None
    compat.processes.placeholder(mesh)
    assert compat.processes.span_of_context(context, partitioned=False) == compat.processes.Span(2)


def test_devices_of_one_process_span_nothing():
    assert compat.processes.span_of(jax.devices()) is None
    assert compat.processes.any_span() is None
