# SPDX-License-Identifier: Apache-2.0
"""Estimates by a compiler's simulator, which a fake stands for: how they are made, stored, shown and used."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import pytest
from tests.ops.sealing import change_object

from ejkernel import compat
from ejkernel.modules import flash_attention
from ejkernel.ops.autotuner.compile.estimating import estimate_calls
from ejkernel.ops.autotuner.compile.prepared import estimates_as_text
from ejkernel.ops.autotuner.compile.schedules import cycles_of
from ejkernel.ops.autotuner.compile.simulation import check_simulated, compiled_and_simulated, extrapolated, parts_of
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.autotuner.compile.threads import GivenUpError
from ejkernel.ops.autotuner.store.saving import AdmissionError, why_not_saved
from ejkernel.ops.autotuner.tasks.task import SharedCall
from ejkernel.ops.autotuner.tier import estimates_of, pruned_by
from ejkernel.ops.autotuner.trials.candidates import Program
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, Outcome
from ejkernel.ops.autotuner.tuner import Autotuner
from ejkernel.ops.config.cache import ConfigCache
from ejkernel.ops.config.estimates import EstimateFiles
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel, living_kernels
from ejkernel.ops.errors import CacheWarning, CandidateError, ConfigError
from ejkernel.ops.execution.discovery import discover_for
from ejkernel.ops.execution.explain import explain_call

V6E = Target.named("tpu_v6e")
X = jax.ShapeDtypeStruct((8,), jnp.int32)
EXCESS: dict[int, float] = {}  # by configuration


class Estimated(Kernel[int, jax.Array]):
    """`2 * x`, which the fake simulator takes `cfg` thousand cycles for; 7 crashes it, and 8 takes it forever."""

    def run(self, x, *, cfg):
        return jax.named_call(lambda x: x + x, name=f"of_{cfg}")(x)

    def reference(self, x):
        return 2 * x

    def heuristic_cfg(self, inv):
        return 20

    def config_space(self, inv):
        return [12, 10, 13, 7, 8]


KERNEL = Estimated("estimated")
CALL = dataclasses.replace(Invocation(kernel=KERNEL, args=(X,)).abstract(), device=V6E.fingerprint)


def simulate(inv, choice):
    if choice.config == 7:
        raise CandidateError("the worker was killed by SIGABRT: F1123 12:00:00.0 1 a.cc:75] Check failed: no such unit")
    if choice.config == 8:
        raise GivenUpError("the worker was silent")
    return Program(cycles=choice.config * 1000.0, least_cycles=choice.config * 1000.0 - EXCESS.get(choice.config, 0))


@pytest.fixture
def store(tmp_path):
    return PersistentCache(tmp_path / "cache", shipped=False)


@pytest.fixture
def estimates(store):
    (found,) = estimate_calls([CALL], V6E, simulate=simulate)
    EstimateFiles(store.path).put(found)
    return found


def chain(store, **options):
    return ConfigSelectorChain(ConfigCache(), store, **options)


# --- the schedule of a compiled program ---

PROGRAM = """\
HloModule jit_f, is_scheduled=true

%fused_computation.1 (p.1: f32[64]) -> f32[64] {
  %p.1 = f32[64]{0:T(64)} parameter(0)
  ROOT %add.1 = f32[64]{0:T(64)} add(%p.1, %p.1)
}

%fused_computation.2 (p.2: f32[64]) -> f32[64] {
  %p.2 = f32[64]{0:T(64)} parameter(0)
  ROOT %add.2 = f32[64]{0:T(64)} add(%p.2, %p.2), metadata={op_name="another"}
}

%body (state: (s32[], f32[64])) -> (s32[], f32[64]) {
  %one = s32[] constant(1)
  %state = (s32[], f32[64]{0:T(64)}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %i.copy = s32[]{:T(128)S(6)} copy(%i)
  %next = s32[] add(%i.copy, %one)
  %x = f32[64]{0:T(64)} get-tuple-element(%state), index=1
  %fusion.9 = f32[64]{0:T(64)} fusion(%x), kind=kLoop, calls=%fused_computation.2
  ROOT %both = (s32[], f32[64]{0:T(64)}) tuple(%next, %fusion.9)
}

%condition (state.1: (s32[], f32[64])) -> pred[] {
  %state.1 = (s32[], f32[64]{0:T(64)}) parameter(0)
  %last = s32[] constant(7)
  %now = s32[] get-tuple-element(%state.1), index=0
  ROOT %less = pred[] compare(%now, %last), direction=LT
}

ENTRY %main (a: f32[64], b: f32[1000]) -> f32[64] {
  %zero = s32[] constant(0)
  %a = f32[64]{0:T(64)} parameter(0)
  %b = f32[1000]{0:T(64)} parameter(1)
  %copy-start = (f32[1000]{0:T(64)S(1)}, f32[1000]{0:T(64)}, u32[]{:S(2)}) copy-start(%b)
  %fusion.1 = f32[64]{0:T(64)} fusion(%a), kind=kLoop, calls=%fused_computation.1, backend_config={"n":{}}
  %copy-done = f32[1000]{0:T(64)S(1)} copy-done(%copy-start)
  %first = (s32[], f32[64]{0:T(64)}) tuple(%zero, %fusion.1)
  %while = (s32[], f32[64]{0:T(64)}) while(%first), condition=%condition, body=%body
  ROOT %result = f32[64]{0:T(64)} get-tuple-element(%while), index=1
}
"""


def test_kernels_are_added_and_loops_repeat_theirs():
    """The loop's kernel is equal to the first, so the simulator has one estimate for both."""
    assert cycles_of(PROGRAM, {"fusion.1": 100}, bytes_per_cycle=1000.0) == 100 + 7 * 100


def test_a_copy_beside_the_kernels_counts_if_it_takes_longer():
    assert cycles_of(PROGRAM, {"fusion.1": 100}, bytes_per_cycle=10.0) == 400 + 7 * 100


def test_slices_that_are_copied_side_by_side_are_an_array_without_a_kernel():
    joined = "%copy-done = f32[1000]{0:T(64)S(1)} copy-done(%copy-start)"
    array = '%joined = f32[1000]{0:T(64)S(1)} custom-call(%copy-done), custom_call_target="ConcatBitcast"'
    program = PROGRAM.replace(joined, f"{joined}\n  {array}")
    assert cycles_of(program, {"fusion.1": 100}, bytes_per_cycle=1000.0) == 100 + 7 * 100


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("constant(7)", "parameter(1)", r"a loop of unknown length \(while\)"),
        ("while(%first), condition", "conditional(%first), condition", "the program branches"),
        ("fusion(%a), kind=kLoop", "fusion(%a), kind=kOutput", r"no estimate for fusion.9 \(fusion\)"),
    ],
)
def test_programs_whose_time_the_estimates_do_not_state_are_refused(before, after, says):
    with pytest.raises(CandidateError, match=says):
        cycles_of(PROGRAM.replace(before, after), {"fusion.1": 100}, bytes_per_cycle=1000.0)


def test_kernels_that_the_simulator_is_wrong_for_are_found_in_the_traced_program():
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def body(number, x, out):
        out[...] = x[...]

    def prefetched(number, x):
        block = pl.BlockSpec((8, 128), lambda i, number: (number[0], 0))
        grid = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(2,), in_specs=[block], out_specs=block)
        return pl.pallas_call(body, grid_spec=grid, out_shape=x)(number, x)

    def with_grid(number, x):
        block = pl.BlockSpec((8, 128), lambda i: (i, 0))
        copy = pl.pallas_call(lambda x, y: None, grid=(number[0],), in_specs=[block], out_specs=block, out_shape=x)
        return copy(x)

    number, x = jnp.zeros((1,), jnp.int32), jnp.zeros((16, 128), jnp.int8)
    facts = [compat.tracing.kernel_facts(jax.jit(jax.jit(f)).trace(number, x).jaxpr) for f in (prefetched, with_grid)]
    assert [(each.scalar_prefetch, each.dynamic_grid) for each in facts] == [(True, False), (False, True)]
    assert "int8" in facts[0].dtypes
    assert facts[0].grid_steps == 2


# --- a part of a call ---


def attention(batch=16, **options):
    like = jax.ShapeDtypeStruct((batch, 64, 2, 128), jnp.bfloat16)
    inv = Invocation(kernel=living_kernels()["flash_attention@v0"][0], args=(like,) * 3, kwargs=options)
    return inv, inv.argument_types


def shapes(parts):
    return [{like.shape for like in types} for types in parts.types]


def test_the_examples_of_a_call_are_its_parts():
    parts = parts_of(*attention())
    assert (parts.number, parts.name) == (16, "batch")
    assert shapes(parts) == [{(count, 64, 2, 128)} for count in (1, 2, 3)]


@pytest.mark.slow
def test_the_examples_of_a_vmapped_backward_call_are_its_parts():
    like = jax.ShapeDtypeStruct((32, 1, 64, 2, 128), jnp.bfloat16)
    attend = jax.vmap(lambda q: flash_attention(q, q, q, causal=True))
    _, inv = discover_for(jax.jit(jax.grad(lambda q: attend(q).astype("float32").sum())), (like,), {}, platform="tpu")
    parts = parts_of(inv, inv.argument_types)
    assert parts.number == 32
    assert {types[0].shape[0] for types in parts.types} == {1, 2, 3}


@pytest.mark.parametrize("inv", [attention(batch=8)[0], Invocation(kernel=KERNEL, args=(X,))])
def test_calls_with_few_examples_and_kernels_without_a_rule_have_no_parts(inv):
    assert parts_of(inv, inv.argument_types) is None


@pytest.mark.parametrize(("times", "cycles"), [((100, 150, 200), 850), ((100, 150, 202), None), ((100, 90, 80), None)])
def test_parts_stand_for_a_call_only_if_each_takes_the_same_time(times, cycles):
    parts = parts_of(*attention())
    remaining = iter(times)
    found = extrapolated(parts, lambda types: next(remaining))
    assert found == (None if cycles is None else (cycles, "1, 2 and 3 of 16 along 'batch'"))


def test_a_part_that_cannot_be_simulated_leaves_the_whole_call():
    def refuse(types):
        raise CandidateError("not estimated: no kernel")

    assert extrapolated(parts_of(*attention()), refuse) is None


def test_a_row_says_what_was_simulated(store):
    part = "1, 2 and 3 of 16 along 'batch'"
    (found,) = estimate_calls([CALL], V6E, simulate=lambda inv, choice: Program(cycles=1000.0, simulated=part))
    EstimateFiles(store.path).put(found)
    assert {row.simulated for row in EstimateFiles(store.path).load(CALL.key).rows} == {part}


# --- estimating ---


def test_each_candidate_has_an_estimate_or_a_reason(estimates):
    rows = {row.config: (row.us, row.is_heuristic, row.reason) for row in estimates.rows}
    assert {config: us for config, (us, _, _) in rows.items()} == {
        20: 11.4286,
        12: 6.8571,
        10: 5.7143,
        13: 7.4286,
        7: None,
        8: None,
    }  # microseconds at 1.75 GHz
    assert [config for config, (_, is_heuristic, _) in rows.items() if is_heuristic] == [20]
    assert rows[7][2] == "not estimated: the worker was killed by SIGABRT: Check failed: no such unit"
    assert rows[8][2] == "not estimated: simulating it takes longer than 600 s"


def test_the_heuristic_is_asked_once_for_all_candidates():
    asked = []

    class Counted(Estimated):
        def heuristic_cfg(self, inv):
            asked.append(inv)
            return 20

    kernel = Counted("counted")
    call = dataclasses.replace(Invocation(kernel=kernel, args=(X,)).abstract(), device=V6E.fingerprint)
    counts = []
    for configs in ([12], [12, 10, 13]):
        asked.clear()
        estimate_calls([call], V6E, candidates=lambda inv, configs=configs: configs, simulate=simulate)
        counts.append(len(asked))
    assert counts[0] == counts[1]


def interrupt_after_three(run):
    """Interrupt a run of estimates once it has three."""

    def interrupt(inv, finished, number):
        if finished == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(progress=interrupt)


def test_an_interrupted_run_goes_on_where_it_stopped(store):
    files, done = EstimateFiles(store.path), []

    def simulated(inv, choice):
        done.append(choice.config)
        return Program(cycles=choice.config * 1000.0)

    run = functools.partial(estimate_calls, [CALL], V6E, simulate=simulated, store=files)
    interrupt_after_three(run)
    stored, before = files.load(CALL.key), len(done)
    assert stored.unfinished
    assert len(stored.ranked) == 3
    (found,) = run()
    assert len(found.rows) == 6
    assert len(done) == before + 3
    assert not files.load(CALL.key).unfinished
    run()  # a finished one is repeated as a whole
    assert len(done) == before + 3 + 6


def test_an_interrupted_run_of_refused_candidates_repeats_only_those_that_were_killed(store):
    files, done = EstimateFiles(store.path), []

    def refused(inv, choice):
        done.append(choice.config)
        raise CandidateError("the worker was killed by SIGKILL" if len(done) == 2 else "not estimated: it branches")

    run = functools.partial(estimate_calls, [CALL], V6E, simulate=refused, store=files)
    interrupt_after_three(run)
    first = list(done)
    (found,) = run()
    assert first[1] in done[len(first) :]
    assert not {first[0], first[2]} & set(done[len(first) :])
    assert {row.reason for row in found.rows} == {"not estimated: it branches"}
    assert files.load(CALL.key) == found


def test_the_reason_of_a_killed_simulator_names_the_memory():
    def killed(inv, choice):
        raise CandidateError("the worker was killed by SIGKILL while compiling")

    (found,) = estimate_calls([CALL], V6E, candidates=lambda inv: [], simulate=killed)
    reason = "not estimated: the worker was killed by SIGKILL while compiling; the memory may have been full"
    assert found.rows[0].reason == reason


@pytest.mark.parametrize("name", ["tpu7x", "tpu_v4", "nvidia_h200"])
def test_a_target_without_a_simulator_is_an_error_that_names_the_others(name):
    with pytest.raises(ConfigError, match=rf"one of the targets tpu_v5e, tpu_v5p, tpu_v6e; got '{name}'"):
        check_simulated(Target.named(name))


def test_a_file_says_that_nothing_was_measured_and_by_what_it_was_estimated(estimates, store):
    (file,) = EstimateFiles(store.path).files()
    stored = json.loads(file.read_text())
    assert stored["status"] == "estimated"
    assert stored["key"]["device"] == "tpu:tpu_v6_lite"
    assert stored["method"].startswith("simulated by libtpu")
    assert {"jax", "libtpu"} == stored["versions"].keys()
    assert EstimateFiles(store.path).load(CALL.key) == estimates


@pytest.mark.parametrize(
    "change", [{"schema": 9}, {"key": {"device": "tpu:other", "op": "a@v0", "call": "b"}}, {"rows": [{"us": -1.0}]}]
)
def test_an_unusable_file_is_skipped_with_a_warning(estimates, store, change):
    (file,) = EstimateFiles(store.path).files()
    change_object(file, lambda data: data.update(change))
    with pytest.warns(CacheWarning, match="ignoring the estimates"):
        assert EstimateFiles(store.path).load(CALL.key) is None


@pytest.mark.parametrize(
    ("heuristic", "last"),
    [
        (20, "untuned calls run 10: 5.7 us, the heuristic 11.4 us"),
        (10, "untuned calls run the heuristic: the heuristic is the fastest, 5.7 us"),
        (
            8,
            "untuned calls run the heuristic: the heuristic has no estimate to compare with, not estimated",
        ),
    ],
)
def test_a_table_says_what_an_untuned_call_runs(store, monkeypatch, heuristic, last):
    monkeypatch.setattr(Estimated, "heuristic_cfg", lambda self, inv: heuristic)
    (found,) = estimate_calls([CALL], V6E, simulate=simulate)
    assert estimates_as_text(found).splitlines()[-1].startswith(last)
    EstimateFiles(store.path).put(found)
    answers = {each.tier: each.note for each in chain(store).consult(CALL, KERNEL)}
    assert answers["estimated"].startswith(last.partition(": ")[2])


def test_reasons_that_differ_only_in_numbers_share_a_line():
    def crash(inv, choice):
        if choice.config in (7, 8):
            raise CandidateError(f"the simulator failed at %v{choice.config}_v1{choice.config}")
        return simulate(inv, choice)

    (found,) = estimate_calls([CALL], V6E, simulate=crash)
    assert "\n2 x not estimated: the simulator failed at %v7_v17, e.g. 7\n" in estimates_as_text(found)


# --- their place among the tiers ---


def test_an_estimate_answers_a_call_that_nothing_else_answers(estimates, store):
    why = explain_call(chain(store), CALL, "")
    assert (why.source, why.config) == ("estimated", 10)
    assert "5.7 us, the heuristic 11.4 us; estimated by the simulator of libtpu" in why.tiers[-1].note
    assert why.tiers[-1].note.endswith("not measured")


def test_a_measured_configuration_ranks_above_an_estimate(estimates, store):
    store.put(CALL.key, 13)
    assert chain(store).resolve(CALL, KERNEL).source == "persistent"


@pytest.mark.parametrize(
    ("heuristic", "note", "last"),
    [
        (10.9, "the heuristic's 6.2 us is within the error of the best, 5.7 us", "heuristic"),
        (11.1, "5.7 us, the heuristic 6.3 us", "estimated"),
    ],
)
def test_within_the_simulators_error_the_heuristic_stays(store, monkeypatch, heuristic, note, last):
    monkeypatch.setattr(Estimated, "heuristic_cfg", lambda self, inv: heuristic)
    (found,) = estimate_calls([CALL], V6E, simulate=simulate)
    EstimateFiles(store.path).put(found)
    answers = {each.tier: each.note for each in chain(store).consult(CALL, KERNEL)}
    assert answers["estimated"].startswith(note)
    assert list(answers)[-1] == last


def test_an_estimate_is_never_saved_as_an_entry(estimates, store):
    asked = chain(store)
    assert asked.resolve(CALL, KERNEL).source == "estimated"
    assert store.load(CALL.key) is None
    rows = tuple(Outcome(config=config, status="estimated") for config in (20, 10))
    searched = AutotuneData(inv=CALL, config=10, outcomes=rows, seconds=1.0, checked=("outputs",))
    assert why_not_saved(searched, validated=True) == "nothing was measured"
    measured = dataclasses.replace(rows[0], status="measured")
    with pytest.raises(AdmissionError, match="has no samples; its status is estimated"):
        why_not_saved(dataclasses.replace(searched, outcomes=(measured, rows[1])), validated=True)


# --- in a later search ---


def test_a_search_starts_from_the_estimates_and_prunes_the_slow_ones(store, monkeypatch):
    monkeypatch.setattr(Estimated, "config_space", lambda self, inv: [12, 10, 13, 30])
    (found,) = estimate_calls([CALL], V6E, simulate=simulate)
    EstimateFiles(store.path).put(found)
    asked = {}

    class Tuner:
        def tune(self, inv, kernel, *, records, rejected, **options):
            asked.update(records=records, rejected=rejected)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chain(store, tuner=Tuner()).search(CALL, KERNEL)
    (record,) = asked["records"]
    assert (record.label, [config for config, _ in record.times]) == ("estimated", [10, 12, 13, 20, 30])
    # 13 is 1.3 times the best; 20 is the heuristic, with which all others are compared
    assert {each.config: each.status for each in asked["rejected"]} == {13: "pruned", 30: "pruned"}
    assert asked["rejected"][-1].reason == "its estimated time is 3.00 times the best estimate; it was not measured"


def test_candidates_whose_excess_of_short_steps_may_explain_their_time_are_not_pruned(store, monkeypatch):
    monkeypatch.setitem(EXCESS, 13, 100)
    monkeypatch.setitem(EXCESS, 20, 9500)
    (found,) = estimate_calls([CALL], V6E, simulate=simulate)
    EstimateFiles(store.path).put(found)
    calls = [SharedCall(inv=CALL)]
    assert not pruned_by(estimates_of(store, calls, KERNEL), calls, KERNEL)
    answers = {each.tier: each.note for each in chain(store).consult(CALL, KERNEL)}
    assert answers["estimated"].startswith("the heuristic's 11.4 us is within the error of the best, 5.7 us")


def test_calls_that_share_a_configuration_have_the_mean_of_their_estimates(store):
    other = dataclasses.replace(CALL, args=(jax.ShapeDtypeStruct((16,), jnp.int32),))

    def longer(inv, choice):
        found = simulate(inv, choice)
        return dataclasses.replace(found, cycles=found.cycles * (16 if inv.args[0].shape == (16,) else 1))

    for each in estimate_calls([CALL, other], V6E, simulate=longer):
        EstimateFiles(store.path).put(each)
    alone = {each.config: each.seconds for each in estimates_of(store, [SharedCall(inv=CALL)], KERNEL)}
    calls = [SharedCall(inv=CALL, weight=3.0), SharedCall(inv=other)]
    shared = estimates_of(store, calls, KERNEL)
    assert [each.config for each in shared] == [10, 12, 13, 20]
    assert [each.seconds / alone[each.config] for each in shared] == pytest.approx([2.0] * 4, rel=1e-3)
    missing = dataclasses.replace(CALL, args=(jax.ShapeDtypeStruct((32,), jnp.int32),))
    assert estimates_of(store, [*calls, SharedCall(inv=missing)], KERNEL) == []


@pytest.mark.slow
def test_a_pruned_candidate_is_not_run():
    here = Invocation(kernel=KERNEL, args=(X,))
    pruned = [Outcome(config=config, status="pruned", reason="slow") for config in (10, 13, 7, 8)]
    data = Autotuner(rounds=1, warmup=0).tune(here, KERNEL, rejected=pruned)
    assert [each.config for each in data.outcomes if each.status == "pruned"] == [10, 13, 7, 8]
    assert data.progress.state.is_finished


# --- programs that the compiler cannot simulate with its usual placement of arrays ---


FULL = "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Program vmem requirement: HLO temp 44.71M"


class Lowered:
    """A lowered program that raises the first errors in `compile`."""

    def __init__(self, folder, *errors):
        self.folder, self.errors, self.options = folder, list(errors), []

    def compile(self, compiler_options):
        assert not list(self.folder.iterdir())
        self.options.append(compiler_options)
        (self.folder / "estimate").touch()
        if self.errors:
            raise jax.errors.JaxRuntimeError(self.errors.pop(0))
        return "compiled"


def test_arrays_of_xla_are_kept_out_of_vector_memory_if_they_do_not_fit_beside_a_kernel(tmp_path):
    lowered = Lowered(tmp_path, FULL)
    assert compiled_and_simulated(lowered, tmp_path, limit="1") == "compiled"
    assert lowered.options == [{"limit": "1"}, {"limit": "1", "xla_vf_vmem_memory_space_assignment": "false"}]


@pytest.mark.parametrize("errors", [("INTERNAL: no",), (FULL, FULL)], ids=["another error", "twice"])
def test_other_errors_are_raised(tmp_path, errors):
    lowered = Lowered(tmp_path, *errors)
    with pytest.raises(jax.errors.JaxRuntimeError):
        compiled_and_simulated(lowered, tmp_path)
    assert len(lowered.options) == len(errors)
