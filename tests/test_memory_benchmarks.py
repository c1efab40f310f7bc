# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of vector memory on TPUs: the tables and weights in the package are those of the committed figures."""

from __future__ import annotations

import functools
import importlib
import json
import types

import jax
import pytest
from benchmarks import memory_attention_tpu, memory_others_tpu, memory_tpu_fit, tpu_windows
from benchmarks.drawn_tpu import ratios
from jax.experimental import pallas as pl

from ejkernel.kernels import _vector_memory
from ejkernel.kernels._vector_memory import (
    REGISTER,
    compiled,
    spilled_registers,
    spilled_registers_of_norms,
    spilled_registers_of_tiles,
)

DRAWN = {
    "memory_attention_tpu": memory_attention_tpu,
    "memory_attention_tpu_space": memory_attention_tpu,
    "memory_others_tpu": memory_others_tpu,
    "memory_others_tpu_space": memory_others_tpu,
}


@functools.cache
def drawn_file(name):
    return json.loads((memory_tpu_fit._RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize("name", DRAWN)
def test_the_results_are_of_calls_that_the_seed_draws(name):
    file = drawn_file(name)
    for index, result in enumerate(file["results"][:10]):
        case = json.loads(json.dumps(DRAWN[name].drawn(file["seed"], index)))
        assert {key: case[key] for key in case if key not in ("estimated", "least", "in table", "params")}.items() <= (
            result.items()
        )


@pytest.mark.parametrize("name", DRAWN)
def test_the_estimates_enclose_the_figure_of_a_drawn_kernel(name):
    for result in drawn_file(name)["results"]:
        today = result | DRAWN[name].estimated(result)
        assert all(ratio >= 1 for ratio in ratios(today, with_kept=True)), result
        if DRAWN[name] is memory_attention_tpu:  # others have no figure of the windows of short arrays
            lower = today | {"estimated": today["least"]}
            assert all(ratio <= 1 for ratio in ratios(lower, with_kept=True)), result


def test_a_ratio_is_of_the_figure_alone_or_with_the_missing_windows():
    result = {"estimated": [120, 50], "used": [100, 50], "kept": [20, 0]}
    assert ratios(result) == [1.2, 1.0]
    assert ratios(result, with_kept=True) == [1.0, 1.0]
    assert ratios({"estimated": [120], "error": "no memory"}) == []


def test_only_windows_that_move_have_two_buffers():
    fixed, moving = pl.BlockSpec((8, 128), lambda i: (0, 0)), pl.BlockSpec((8, 128), lambda i: (i + 1, 0))
    like = jax.ShapeDtypeStruct((64, 128), "float32")
    specs = {"in_specs": [fixed, moving], "out_specs": moving}
    for grid, moves in ((4, [False, True, True]), (1, [False] * 3)):
        run = pl.pallas_call(lambda *refs: None, grid=(grid,), out_shape=like, **specs)
        (kernel,) = tpu_windows._kernels(jax.jit(run).trace(like, like).jaxpr.jaxpr)
        mapping = kernel.params["grid_mapping"]
        assert [tpu_windows._moves(one, mapping.grid) for one in mapping.block_mappings] == moves


def test_a_window_of_the_same_block_in_each_step_does_not_move():
    spec = pl.BlockSpec((8, 128), lambda head, block: (head // 4, 0))
    like = jax.ShapeDtypeStruct((64, 128), "float32")
    for heads, moves in ((4, False), (8, True)):
        run = pl.pallas_call(lambda *refs: None, grid=(heads, 3), out_shape=like, in_specs=[spec], out_specs=spec)
        (kernel,) = tpu_windows._kernels(jax.jit(run).trace(like).jaxpr.jaxpr)
        mapping = kernel.params["grid_mapping"]
        assert [tpu_windows._moves(one, mapping.grid) for one in mapping.block_mappings] == [moves, moves]


def committed_weights(name):
    module = memory_tpu_fit._WEIGHTS[name].removesuffix(".py").replace("/", ".")
    return importlib.import_module(f"ejkernel.{module}").WEIGHTS


@functools.cache
def kernels_by_kind(name):
    found = {}
    for one in memory_tpu_fit.kernels()[name]:
        found.setdefault(one.parts.kind, []).append(one)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", memory_tpu_fit._WEIGHTS)
def test_the_estimates_enclose_a_committed_figure(name):
    weights = committed_weights(name)
    assert weights.keys() == kernels_by_kind(name).keys()
    for kind, several in kernels_by_kind(name).items():
        # windows of one value for each row may have one buffer in place of two
        assert all(one.parts.least <= 1.01 * one.used for one in several)
        assert all(memory_tpu_fit.estimate(one, weights[kind]) >= one.used for one in several)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [("pallas_tpu", "keys, strips"), ("splash", "fused, float32"), ("others", "rms norm, forward")]
)
def test_the_weights_of_a_kind_are_fitted_to_its_figures(name, kind):
    assert memory_tpu_fit.fit_of(kernels_by_kind(name)[kind]).weights == committed_weights(name)[kind]


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize("name", memory_tpu_fit._WEIGHTS)
def test_the_weights_are_those_of_the_committed_figures(name):
    found = memory_tpu_fit.fits(memory_tpu_fit.kernels()[name])
    table = {kind: fit.weights for kind, fit in found.items()}
    path = memory_tpu_fit._SOURCES / memory_tpu_fit._WEIGHTS[name]
    assert path.read_text() == memory_tpu_fit.written_weights(table)


def test_the_table_of_code_is_that_of_the_committed_figures():
    assert memory_tpu_fit.code_of_forms() == compiled()


def test_the_margins_of_code_alike_are_those_of_the_committed_figures():
    assert memory_tpu_fit.margins_of_views(compiled()) == _vector_memory._tables()["margins"]


def test_a_margin_covers_the_kernels_that_exceed_other_code_and_views_with_few_kernels_have_none():
    views = {"close": [1.0] * 50, "far": [1.0] * 99 + [0.9] * 2, "farther": [1.0] * 9 + [0.5], "few": [1.0] * 7}
    assert list(memory_tpu_fit._margins_of_kind(views)) == [("close", 1.06), ("far", pytest.approx(1.14, abs=0.001))]


def test_the_chosen_calls_have_all_code_that_the_table_lacks_each_once_and_small_kernels_first(monkeypatch):
    lacks = [{"a"}, set(), {"b", "c"}, {"a", "c"}, {"a"}, {"d"}]
    work = [1, 1, 1, 9, 2, 1]
    monkeypatch.setattr(memory_attention_tpu, "_CALLS", len(lacks))
    monkeypatch.setattr(memory_attention_tpu, "lacking", lambda case: lacks[case["index"]])
    monkeypatch.setattr(memory_attention_tpu, "_work", lambda case: work[case["index"]])
    monkeypatch.setattr(memory_attention_tpu, "drawn", lambda seed, index: {"index": index})
    chosen = memory_attention_tpu.missing.__wrapped__()
    assert [case["index"] for case in chosen] == [0, 2, 5]


def test_code_of_the_table_is_not_lacking():
    first = drawn_file("memory_attention_tpu")["results"][0]
    assert memory_attention_tpu.lacking(first) == set()
    rare = first | {"dims": [200, 8], "soft_cap": 1.0, "mask": "two sides", "dtype": "float32"}
    assert memory_attention_tpu.lacking(rare)


def test_results_of_attention_are_added_to_the_figures_without_the_estimates_and_once(tmp_path, monkeypatch):
    call = {"implementation": "splash", "used": [1]}
    old = {"what": "w", "versions": {"jax": "1"}, "results": [call]}
    (tmp_path / "memory_attention_tpu_fitted.json").write_text(json.dumps(old))
    (tmp_path / "tables.json").write_text(json.dumps({"versions": {}, "code": {}}))
    given = [call, call | {"used": [2], "estimated": [3], "least": [1], "in table": True}, {"error": "refused"}]
    (tmp_path / "new.json").write_text(json.dumps({"versions": {"jax": "2"}, "results": given}))
    monkeypatch.setattr(memory_tpu_fit, "_RESULTS", tmp_path)
    monkeypatch.setattr(memory_tpu_fit, "_TABLE", tmp_path / "tables.json")
    memory_tpu_fit.add_results([tmp_path / "new.json"])
    found = json.loads((tmp_path / "memory_attention_tpu_fitted.json").read_text())
    assert found == {"what": "w", "versions": {"jax": "2"}, "results": [call, call | {"used": [2]}]}


def test_known_bytes_and_registers_of_loops_are_the_compilers_figures():
    exact = kernels = 0
    for parts, one, index in memory_tpu_fit._of_attention():
        if parts.loop and "spilled" in one:
            straight, around, loop = one["spilled"][index]
            figure = one["used"][index] + one.get("kept", [0] * len(one["used"]))[index]
            estimate = parts.known + REGISTER * max(straight, around + loop)
            assert figure <= estimate <= 1.1 * figure, one  # a kernel of one step has one buffer of each window
            exact, kernels = exact + (estimate == figure), kernels + 1
    assert exact >= 0.7 * kernels > 100


PROGRAM = """
$region0: #{attention_forward.1}
  $region1: #{attention_forward.1} parent=0
    $region4: #{attention_forward.1} parent=1 // loop_body
      $region9: #{attention_forward.1} parent=4 // pred_region
        #allocation7_spill [shape = 'u32[8,128]{1,0}', space=vmem, tag = 'spilled vreg/vmreg']
        $region11: #{attention_forward.1} parent=9 // pred_region
          #allocation8_spill [shape = 'u32[8,128]{1,0}', space=vmem, tag = 'spilled vreg/vmreg']
          #allocation9_spill [shape = 'u32[8,128]{1,0}', space=vmem, tag = 'spilled vreg/vmreg']
        $region12: #{attention_forward.1} parent=9 // pred_region
          $region13: #{attention_forward.1} parent=12 // loop_body
            #allocation10_spill [shape = 'u32[8,128]{1,0}', space=vmem, tag = 'spilled vreg/vmreg']
"""


def test_the_registers_of_a_program_are_those_of_the_regions_that_are_alive_together(tmp_path):
    (tmp_path / "1-attention_forward.1-00-post-ra.txt").write_text(PROGRAM)
    (tmp_path / "1-attention_forward.1-02-post-bundle-packing-post-ra.txt").touch()
    assert tpu_windows.spilled_of("attention_forward.1", tmp_path) == (3, 1, 1)


def test_a_program_of_a_call_that_failed_is_not_read_for_the_next_one(tmp_path, monkeypatch):
    def failing(*_):
        (tmp_path / "1-attention_forward.1-00-post-ra.txt").write_text(PROGRAM)
        raise RuntimeError("refused")

    def compiling(*_):
        (tmp_path / "2-attention_forward.1-00-post-ra.txt").write_text(PROGRAM)
        return [types.SimpleNamespace(name="attention_forward.1", used=1, kept=0)]

    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"{tpu_windows.DUMP}{tmp_path}")
    monkeypatch.setattr(memory_attention_tpu, "TARGETS", {"v5e": types.SimpleNamespace(placed=lambda array: array)})
    monkeypatch.setattr(memory_attention_tpu, "described", lambda case: (None, None, ()))
    monkeypatch.setattr(memory_attention_tpu, "params_of", lambda *_: None)
    case = {"chip": "v5e", "params": {}}
    monkeypatch.setattr(tpu_windows, "of_attention", failing)
    with pytest.raises(RuntimeError, match="refused"):
        memory_attention_tpu.compiled(case)
    monkeypatch.setattr(tpu_windows, "of_attention", compiling)
    assert memory_attention_tpu.compiled(case) == {"used": [1], "kept": [0], "spilled": [(3, 1, 1)]}


def test_the_table_of_tiles_has_all_listed_products():
    found = {}
    for case in memory_others_tpu._listed():
        if case["kind"] != "tpu_ragged":
            memory_others_tpu.add_registers({"tiles": found}, case | {"used": [0]})
    assert {form: row.keys() for form, row in found.items()} == {
        form: row.keys() for form, row in spilled_registers_of_tiles().items()
    }
    missing = {form for form, rows in spilled_registers_of_tiles().items() for row in rows.values() if None in row}
    assert missing == {"tpu:tpu_v4, bfloat16, product", "tpu:tpu_v4, bfloat16, weights"}  # 1,024 cubed, in 16 MiB


def test_registers_of_a_listed_kernel_are_those_of_the_table():
    case = memory_others_tpu._alone("v5e", "bfloat16", 8, 4, 32, 512)
    tables = {"registers": {}}
    memory_others_tpu.add_registers(tables, case | {"used": [10_895_360]})
    ((form, row),) = tables["registers"].items()
    assert row == {"32": {"512": 996}}
    assert spilled_registers()[form]["32"]["512"] == 996


def test_the_table_of_norms_has_listed_ones():
    places = {}
    for case in memory_others_tpu._listed_norms():
        memory_others_tpu.add_registers({"norms": places}, case | {"used": [1 << 24]})
    table = spilled_registers_of_norms()
    assert table.keys() <= places.keys()
    assert {(form, dim) for form, rows in table.items() for dim in rows} <= {
        (form, dim) for form, rows in places.items() for dim in rows
    }


def test_the_table_has_the_most_registers_of_normalisations_with_one_place():
    sizes = {"rows": 8, "dim": 6144, "residual": False, "dtype": "bfloat16", "eps": 1e-6}
    case = {"chip": "v6e", "kind": "rms_norm", "sizes": sizes, "backward": True, "params": {"block_rows": 16}}
    tables = {}
    for registers in (41, 40):
        used = memory_others_tpu.parts_of(case).known + REGISTER * registers
        memory_others_tpu.add_registers(tables, case | {"used": [used - 4096], "kept": [4096]})
    form = "tpu:tpu_v6_lite, rms norm, bfloat16, backward, 16 rows"
    assert tables == {"norms": {form: {"6144": [None, None, 41]}}}
