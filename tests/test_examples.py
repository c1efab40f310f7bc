# SPDX-License-Identifier: Apache-2.0
"""The examples: their programs run, and their results are those of plain JAX or of the usual way."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import runpy
import sys
from pathlib import Path

import jax
import pytest
from tests import forked

# --- the index, and replaced attention ---


EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
INDEX = (EXAMPLES / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [("gemma", ["--seq", "512"]), ("triangle_attention", ["--residues", "96"])],
    ids=["gemma", "triangle attention"],
)
def test_the_replaced_attention_computes_the_same_in_less_memory(monkeypatch, capsys, name, size):
    if name == "gemma":
        pytest.importorskip("flax")
    file = EXAMPLES / name / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [file.name, *size])
    runpy.run_path(str(file), run_name="__main__")  # exits if the results differ
    before, after = (int(part.split()[0]) for part in capsys.readouterr().out.split("arrays: ")[1].split(", "))
    assert after <= 0.8 * before


def test_the_index_lists_every_example_and_shows_how_to_run_it():
    folders = sorted(place.name for place in EXAMPLES.iterdir() if place.is_dir() and any(place.glob("*.py")))
    assert sorted(re.findall(r"^\| \[(\w+)\]\(\1\)", INDEX, re.M)) == folders
    shown = re.findall(r"`(?:python|ejkernel tune) (examples/[^\s`:]+)", INDEX)
    assert all((EXAMPLES.parent / file).is_file() for file in shown)
    assert sorted({Path(file).parent.name for file in shown}) == folders


# --- data_parallel: training steps over a mesh, in two libraries ---


DATA_PARALLEL = EXAMPLES / "data_parallel" / "run.py"


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(("data", "model"), [(4, 1), (2, 2)])
@pytest.mark.parametrize(("library", "needs"), [("equinox", "equinox"), ("nnx", "flax")])
def test_a_step_over_a_mesh_matches_plain_jax(library, needs, data, model):
    pytest.importorskip(needs)
    size = ["--data", str(data), "--model", str(model), "--steps", "3"]
    done = run(DATA_PARALLEL.parent, "-c", _ON_FOUR_DEVICES, "--library", library, *size)
    assert done.returncode == 0, done.stderr
    assert "losses agree" in done.stdout


def run(folder, *arguments):
    """Run `python *arguments` in another process, with the cache of this test."""
    return forked.python(folder, *arguments, EJKERNEL_CACHE_DIR=os.environ["EJKERNEL_CACHE_DIR"])


_ON_FOUR_DEVICES = """
import runpy, jax
jax.config.update("jax_num_cpu_devices", 4)
runpy.run_path("run.py", run_name="__main__")
"""

# --- language_model_head: the loss without logits in memory ---


LANGUAGE_MODEL_HEAD = EXAMPLES / "language_model_head"


@pytest.mark.slow
@pytest.mark.parametrize(("library", "needs"), [("equinox", "equinox"), ("nnx", "flax")])
def test_model_learns_the_same_without_logits_in_memory(monkeypatch, capsys, library, needs):
    pytest.importorskip(needs)
    monkeypatch.syspath_prepend(str(LANGUAGE_MODEL_HEAD))
    monkeypatch.delitem(sys.modules, f"{library}_model", raising=False)
    sizes = ["--vocabulary", "4096", "--width", "16", "--tokens", "1024"]
    monkeypatch.setattr(sys, "argv", ["run.py", "--library", library, *sizes])
    runpy.run_path(str(LANGUAGE_MODEL_HEAD / "run.py"), run_name="__main__")  # exits if the losses differ
    monkeypatch.delitem(sys.modules, f"{library}_model")
    before, after = (int(part.split()[0]) for part in capsys.readouterr().out.split("arrays: ")[1].split(", "))
    assert after <= 0.4 * before


# --- mixture_of_experts: a layer of experts, in three libraries ---


EXPERTS = EXAMPLES / "mixture_of_experts" / "run.py"


@pytest.mark.slow
@pytest.mark.parametrize(("library", "needs"), [("plain", "jax"), ("equinox", "equinox"), ("nnx", "flax")])
def test_a_layer_of_experts_matches_jax_s_products(library, needs):
    pytest.importorskip(needs)
    done = run(EXPERTS.parent, "run.py", "--library", library, "--steps", "4")
    assert done.returncode == 0, done.stderr
    assert "losses agree" in done.stdout


@pytest.fixture
def experts(monkeypatch):
    """The experts as a module, removed after the test."""
    monkeypatch.syspath_prepend(str(EXPERTS.parent))
    yield importlib.import_module("run")
    for name in ("run", "layer", "plain_model"):
        sys.modules.pop(name, None)


def test_a_contender_out_of_memory_is_left_out_with_the_reason(experts, monkeypatch):
    def too_large(parameters, x):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 TiB.\nMore.")

    def kept(parameters, x):
        return x * parameters

    one = jax.numpy.ones(())
    monkeypatch.setattr(experts, "models", lambda *_: {"ejkernel": (kept, one), "ragged_dot": (too_large, one)})
    result = experts.train("plain", experts.Size(), steps=2, contenders=("ejkernel", "ragged_dot"))
    assert result["ragged_dot"] == {"failed": "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 TiB."}
    assert len(result["ejkernel"]["losses"]) == 3
    assert "left out: RESOURCE_EXHAUSTED" in list(experts.lines(result))[1]
    assert experts.disagreement(result, 1e-4) is None


def test_differing_losses_are_reported(experts):
    result = {"ejkernel": {"losses": [1.0, 2.0]}, "ragged_dot": {"losses": [1.0, 2.1]}, "dense": {"losses": [5.0, 4.0]}}
    assert "losses disagree" in experts.disagreement(result, 1e-2)
    assert experts.disagreement(result, 1e-1) is None


# --- serving: no request, text or page is lost ---


SERVING = EXAMPLES / "serving"


@pytest.mark.slow
def test_every_request_gets_the_text_of_the_model_without_a_cache(monkeypatch, capsys):
    """With forks, early stops, cancelled and preempted requests; the script fails otherwise."""
    monkeypatch.syspath_prepend(str(SERVING))
    import serve

    monkeypatch.setattr(sys, "argv", ["serve.py", "--requests", "24"])
    assert serve.main() == 0
    report = capsys.readouterr().out
    assert "missing requests: 0, wrong texts: 0, lost pages: 0" in report
    for what in ("forked", "cancelled", "preempted", "copied pages", "generated tokens"):
        assert f"{what}: 0" not in report


# --- eight_bit_training: FP8 trains as bfloat16 does ---


EIGHT_BIT_TRAINING = EXAMPLES / "eight_bit_training" / "eight_bit_training.py"


@pytest.mark.slow
@pytest.mark.whole
def test_the_loss_curves_of_fp8_and_bfloat16_agree():
    size = ["--steps", "120", "--seeds", "2", "--tokens", "64", "--width", "32"]
    done = run(EIGHT_BIT_TRAINING.parent, EIGHT_BIT_TRAINING.name, *size)
    assert done.returncode == 0, done.stderr
    assert "the curves agree" in done.stdout


@pytest.fixture
def training(monkeypatch):
    """The training with two of its recipes."""
    spec = importlib.util.spec_from_file_location("eight_bit_training", EIGHT_BIT_TRAINING)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RECIPES", ("bfloat16", "current scaling"))
    return module


@pytest.mark.slow
def test_scaled_fp8_trains_like_bfloat16(training, capsys):
    assert training.main(["--steps", "60", "--seeds", "2", "--tokens", "64", "--width", "32"]) == 0
    assert "the curves agree" in capsys.readouterr().out


@pytest.mark.slow
def test_a_recipe_that_trains_worse_is_reported(training, monkeypatch, capsys):
    plain = training.quantized_dense
    monkeypatch.setattr(training, "quantized_dense", lambda x, w, **options: plain(x, w, **options) * 0.3)
    assert training.main(["--steps", "60", "--seeds", "2", "--tokens", "64", "--width", "32"]) == 1
    assert "the curves disagree" in capsys.readouterr().out
