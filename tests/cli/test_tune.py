# SPDX-License-Identifier: Apache-2.0
"""The `ejkernel` command, as a person types it."""

import concurrent.futures
import errno
import json
import os
import re
import signal
import sys
import warnings

import jax
import pytest
from tests import forked
from tests.ops.autotuner.made_up_times import interleaved_with

from ejkernel.cli import main, shares
from ejkernel.cli import tune as commands
from ejkernel.ops import (
    AutotunePolicy,
    AutotuningResult,
    ConfigSelectorChain,
    Invocation,
    NoConfigError,
    PersistentCache,
)
from ejkernel.ops.autotuner.bench import timing
from ejkernel.ops.autotuner.fleet import ray_executor
from ejkernel.ops.autotuner.tasks import in_process
from ejkernel.ops.autotuner.tasks.run import TuningRun
from ejkernel.ops.config import entries as stored
from ejkernel.ops.config import persistent
from ejkernel.ops.config.policy import effective_policy

pytestmark = pytest.mark.slow

PROGRAM = '''
import dataclasses
import jax
import jax.numpy as jnp
from ejkernel.ops import Kernel


@dataclasses.dataclass(frozen=True)
class Config:
    repeats: int = 8


class Product(Kernel[Config, jax.Array]):
    """A product that is slower with more repeats, wrong, or fails."""

    def run(self, a, b, *, cfg):
        if cfg.repeats < 0:
            raise RuntimeError("this candidate fails")
        for _ in range(cfg.repeats):
            b = b + 1e-30 * jnp.sin(b @ b)
        return a @ b * (2 if cfg.repeats == 0 else 1)

    def heuristic_cfg(self, inv):
        return Config(8)

    def config_space(self, inv):
        return [Config(n) for n in (1, 0, -1)]


product = Product("product")


def step():
    shape = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    return jax.grad(lambda a, b: jnp.sum(product(a, b) ** 2)), (shape, shape)


def forward():
    shape = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    return product, (shape, shape)


needs_two = lambda a, b: None
number = 3


def raises():
    raise KeyError("no such thing")


def nothing():
    return jnp.sin, (jnp.ones(3),)


def forgetful():
    return jnp.sin
'''


NOTHING = AutotuningResult("cpu", ())


def time_of(config):
    """Stand in for a clock."""
    return float(config.repeats)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A module `program` in the working directory, and nowhere else."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.setattr(timing, "interleaved", interleaved_with(time_of))
    monkeypatch.setattr(commands, "_step_check", lambda *_: None)  # these times are made up: see test_step.py
    yield tmp_path
    sys.modules.pop("program", None)


def run(capsys, *arguments):
    status = main(arguments)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_a_program_is_tuned_forward_and_backward_and_saved(program, capsys):
    status, out, err = run(capsys, "tune", "--in-process", "program:step", "--cache", "saved")
    assert status == 0
    assert "2 distinct calls, 1 forward and 1 backward" in err
    assert "product.bwd" in out
    assert "repeats=1" in out
    assert "1 wrong, 1 failed" in out
    assert re.search(r"2 calls in [\d.]+ s: 2 faster than the heuristic; saved in", err)
    assert len(list((program / "saved").rglob("*.json"))) == 2


def test_tuned_calls_are_not_tuned_again_unless_forced(program, capsys):
    run(capsys, "tune", "--in-process", "program:step", "--cache", "saved")
    status, out, err = run(capsys, "tune", "--in-process", "program:step", "--cache", "saved")
    assert status == 0
    assert "2 calls already tuned; --force tunes again" in err
    assert "Nothing to tune" in out
    _, out, _ = run(capsys, "tune", "--in-process", "program:step", "--cache", "saved", "--force")
    assert "product.bwd" in out


def test_a_call_whose_kernel_has_changed_is_named_until_it_is_tuned_again(program, capsys, monkeypatch):
    arguments = ("tune", "--in-process", "program:forward", "--cache", "saved")
    run(capsys, *arguments)
    assert "changed" not in run(capsys, *arguments)[2]
    kernel = sys.modules["program"].Product
    monkeypatch.setattr(kernel, "config_space", lambda self, inv: [type(self.heuristic_cfg(inv))(2)])
    says = "product@v0 f32[128,128] x2: its search space has changed since; --force tunes it again."
    assert says in run(capsys, *arguments)[2]
    assert says in run(capsys, *arguments, "--dry-run")[2]
    assert "repeats=2" in run(capsys, *arguments, "--force")[1]
    assert "changed" not in run(capsys, *arguments)[2]


def test_a_saved_configuration_that_does_not_run_is_tuned_again(program, capsys):
    arguments = ("tune", "--in-process", "program:forward", "--cache", "saved")
    run(capsys, *arguments, "--dry-run")
    module = sys.modules["program"]
    function, shapes = module.forward()
    inv = Invocation(kernel=function, args=shapes)
    store = PersistentCache("saved")
    store.put(inv.key, module.Config(-2))
    assert "stale" in run(capsys, *arguments, "--dry-run")[1]
    assert "repeats=1" in run(capsys, *arguments)[1]
    store.put(inv.key, module.Config(3))  # outside the space, but it runs
    assert "Nothing to tune" in run(capsys, *arguments)[1]


def test_an_undecided_call_keeps_its_entry_and_is_named(program, capsys, monkeypatch):
    def noisy_run(*arguments):
        noise = {8: (1.0, 2.0, 2.0, 1.0), 1: (2.0, 1.0, 1.0, 2.0)}
        monkeypatch.setattr(timing, "interleaved", interleaved_with(lambda config: noise.get(config.repeats, 9.0)))
        return run(capsys, "tune", "--in-process", "program:forward", *arguments)

    run(capsys, "tune", "--in-process", "program:forward", "--cache", "saved")
    status, out, err = noisy_run("--cache", "saved", "--force")
    assert (status, "not saved: undecided, so the saved configuration, repeats=1, stays" in out) == (0, True)
    assert "1 with the configuration saved earlier; the saved configurations stay" in err
    assert "1 undecided (product@v0" in err
    assert "--undecided --budget" in err
    assert re.search(r"undecided, saved one in force +repeats=1", out)
    assert "undecided" not in noisy_run("--cache", "saved")[2]
    noisy_run("--cache", "new")
    says = "(product@v0 f32[128,128] x2); `--undecided --budget 20` measures it again, for up to 20 s per call."
    assert says in noisy_run("--cache", "new")[2]
    assert "1 call in" in noisy_run("--cache", "new", "--undecided", "--budget", "30")[2]
    assert "--undecided --budget 60`" in noisy_run("--cache", "new", "--undecided", "--budget", "30")[2]


def selector(folder):
    return ConfigSelectorChain(persistent=PersistentCache(folder), policy=AutotunePolicy(heuristic=False))


def test_a_search_that_ran_out_of_time_is_gone_on_with_by_the_next_run(program, capsys):
    arguments = ("tune", "--in-process", "program:step", "--cache", "saved")
    run(capsys, *arguments, "--budget", "0.000001")
    status, out, err = run(capsys, *arguments, "--budget", "0.000001")
    assert (status, "none saved yet" in err) == (1, True)
    assert "2 searches can continue: run the command again, with --budget " in err
    assert "2 calls have no saved configuration yet, so EJKERNEL_ON_MISS=error raises" in err
    kernel, chain = sys.modules["program"].product, selector(program / "saved")
    inv = Invocation(kernel=kernel, args=(jax.ShapeDtypeStruct((128, 128), "float32"),) * 2)
    with pytest.raises(NoConfigError, match=r"Its search is not finished \(1 of 4\); tuning again continues it"):
        chain.resolve(inv, kernel)
    assert "already tuned" not in err
    assert "not finished (1 of 4)" in out
    assert "kept" not in out
    status, out, err = run(capsys, *arguments, "--budget", "600")
    assert status == 0
    assert "2 faster than the heuristic; saved" in err
    assert "repeats=1" in out


@pytest.mark.parametrize("function", ["forward", "step"])
def test_calls_that_a_time_for_all_calls_leaves_unfinished_have_not_failed(program, capsys, monkeypatch, function):
    monkeypatch.setattr(shares, "_LEAST", 1e-6)
    arguments = ("tune", "--in-process", f"program:{function}", "--cache", "saved", "--time", "0.000001")
    status, out, err = run(capsys, *arguments)
    assert status == 1
    assert "not finished (1 of 4)" in out
    assert "1 not finished" in err
    assert "can continue: run the command again" in err
    assert "failed" not in err
    assert "no call could be tuned" not in err


ALONE = """
from program import Config, Product, forward

class Alone(Product):
    def config_space(self, inv):
        return [self.heuristic_cfg(inv)]

alone = Alone("alone")

def program():
    product, args = forward()
    return lambda a, b: product(alone(a, b), b), args
"""


def test_calls_with_a_single_candidate_come_last_and_take_little_of_the_time(program, capsys, monkeypatch):
    def note(selector, sets, **_):
        seen.append((sets[0][0].inv.op_id, effective_policy(selector).budget_s))
        return NOTHING

    seen = []
    (program / "alone_program.py").write_text(ALONE)
    monkeypatch.setattr(shares, "tune_together", note)
    run(capsys, "tune", "--in-process", "alone_program:program", "--cache", "saved", "--time", "1100")
    assert seen == [("product", pytest.approx(1000, rel=0.01)), ("alone", pytest.approx(1100, rel=0.01))]


@pytest.mark.parametrize(("options", "resume"), [((), True), (("--force",), False)])
def test_force_repeats_the_measurements_of_a_partial_search(program, capsys, monkeypatch, options, resume):
    seen = []
    monkeypatch.setattr(commands, "tune_together", lambda *_, **more: seen.append(more["resume"]) or NOTHING)
    run(capsys, "tune", "--in-process", "program:forward", "--cache", "saved", *options)
    assert seen == [resume]


@pytest.mark.filterwarnings("default")
def test_a_program_without_tunable_calls_is_a_failure(program, capsys):
    (program / "broken.py").write_text(PROGRAM.replace("def config_space(self, inv):", BREAKING))
    status, out, err = run(capsys, "tune", "--in-process", "broken:step")
    assert status == 1
    assert "its configurations cannot be determined: config_space raised RuntimeError: no space left" in err
    assert "no call could be tuned" in err
    assert out == ""
    del sys.modules["broken"]


BREAKING = """def config_space(self, inv):
        raise RuntimeError("no space left")

    def other_space(self, inv):"""


def test_the_result_is_json_on_request(program, capsys):
    _, out, _ = run(capsys, "tune", "--in-process", "program:step", "--json")
    entries = json.loads(out)["entries"]
    assert [entry["op"] for entry in entries] == ["product@v0", "product.bwd@v0"]
    assert all(entry["config"] == {"repeats": 1} for entry in entries)
    assert {failure["status"] for failure in entries[0]["measured"]["failures"]} == {"wrong", "failed"}


def test_verbose_prints_the_status_of_every_candidate(program, capsys):
    _, out, _ = run(capsys, "tune", "--in-process", "program:step", "--verbose")
    assert "RuntimeError: this candidate fails" in out
    assert re.search(r"repeats=\d +wrong .* result 0 differs from the reference", out)
    assert re.search(r"^\* +repeats=1 +measured", out, re.M)


def test_a_dry_run_lists_the_calls_and_measures_nothing(program, capsys):
    status, out, _ = run(capsys, "tune", "--in-process", "program:step", "--dry-run", "--cache", "saved")
    assert status == 0
    assert "product.bwd@v0" in out
    assert "f32[128,128] x2" in out
    assert not (program / "saved").exists()
    _, out, _ = run(capsys, "tune", "--in-process", "program:step", "--dry-run", "--json")
    assert [call["op"] for call in json.loads(out)] == ["product@v0", "product.bwd@v0"]


def test_a_dry_run_says_which_calls_are_tuned_already(program, capsys):
    run(capsys, "tune", "--in-process", "program:forward", "--cache", "saved")
    _, out, _ = run(capsys, "tune", "--in-process", "program:step", "--dry-run", "--cache", "saved")
    assert re.search(r"product@v0 .* complete$", out, re.M)
    assert re.search(r"product.bwd@v0 .* no$", out, re.M)
    _, out, _ = run(capsys, "tune", "--in-process", "program:step", "--dry-run", "--cache", "saved", "--json")
    assert [call["tuned"] for call in json.loads(out)] == ["complete", "no"]


def test_a_call_out_of_time_is_tuned_in_part(program, capsys):
    arguments = ("tune", "--in-process", "program:forward", "--cache", "saved")
    run(capsys, *arguments, "--budget", "0.000001")
    words = r"product@v0 .* not finished \(1 of 4\)"
    data = {"state": "partial", "done": 1, "candidates": 4}
    assert re.search(f"{words}$", run(capsys, *arguments, "--dry-run")[1], re.M)
    assert json.loads(run(capsys, *arguments, "--dry-run", "--json")[1])[0]["search"] == data
    assert re.search(r"product@v0 .* not finished \(1 of 4\) ", run(capsys, "show", "--cache", "saved")[1], re.M)
    (shown,) = json.loads(run(capsys, "show", "--cache", "saved", "--json")[1])
    assert (shown["search"], shown["config"]) == (data, None)
    log = run(capsys, "show", "--cache", "saved", "--log", "product")[1]
    assert "not finished (1 of 4): the budget was spent when only the heuristic was measured" in log
    assert "no candidate was measurably faster" not in log
    (logged,) = json.loads(run(capsys, "show", "--cache", "saved", "--log", "product", "--json")[1])
    assert logged["search"] == data
    _, out, err = run(capsys, "explain", "program:forward", "--cache", "saved")
    assert "search     not finished (1 of 4)" in out
    shown = re.search(r"candidates ejkernel (show --cache saved --log product:\w+)", out)[1]
    assert run(capsys, *shown.split())[1] == log
    assert "0 of 1 call with a saved configuration" in err
    _, out, _ = run(capsys, "explain", "program:forward", "--cache", "saved", "--json")
    assert json.loads(out)[0]["search"] == data


def test_stale_calls_are_tuned_again_on_request(program, capsys, monkeypatch):
    arguments = ("tune", "--in-process", "program:forward", "--cache", "saved", "--dry-run")
    run(capsys, "tune", "--in-process", "program:forward", "--cache", "saved")
    monkeypatch.setattr(stored, "version", lambda name: "9.9")
    assert re.search(r"product@v0 .* complete$", run(capsys, *arguments)[1], re.M)
    monkeypatch.setenv("EJKERNEL_STALE", "jax=retune")
    assert re.search(r"product@v0 .* stale$", run(capsys, *arguments)[1], re.M)


def test_one_of_a_thing_is_not_called_several(program, capsys):
    _, _, err = run(capsys, "tune", "--in-process", "program:forward", "--cache", "saved")
    assert "1 distinct call, 1 forward" in err
    assert "1 call in " in err
    _, _, err = run(capsys, "tune", "--in-process", "program:forward", "--cache", "saved")
    assert "1 call already tuned; --force tunes again" in err


@pytest.mark.parametrize("mode", [[], ["--dry-run"]], ids=["tuning", "dry run"])
def test_a_program_without_calls_is_a_failure(program, capsys, mode):
    status, out, err = run(capsys, "tune", "--in-process", "program:nothing", *mode)
    assert status == 1
    assert "0 distinct calls" in err
    assert "the program of program:nothing made no call of an operation" in err
    assert out == "Nothing to tune.\n"


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["empty.mlir", "empty.exported"])
def test_a_text_that_names_no_call_is_a_warning_and_a_failure(program, capsys, name):
    exported = jax.export.export(jax.jit(lambda x: x + 1))(jax.ShapeDtypeStruct((4,), "float32")).serialize()
    (program / name).write_bytes(b"module {}" if name == "empty.mlir" else exported)
    status, _, err = run(capsys, "tune", "--in-process", name)
    assert status == 1
    assert f"{name} has no labels of kernel calls: it makes none, or was lowered with EJKERNEL_OPS_STAMP=none" in err
    assert f"{name} has no call that can be tuned here" in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("some words", "is not a lowered program: it has no `module` of StableHLO or HLO"),
        ('{"module": {"a": 1}}', "is not a lowered program"),
        ("", "is empty"),
    ],
)
def test_a_file_without_a_program_gives_the_reason(program, capsys, text, says):
    (program / "words.txt").write_text(text)
    status, _, err = run(capsys, "tune", "--in-process", "words.txt")
    assert status == 1
    assert f"words.txt {says}" in err
    assert ".as_text()" in err
    assert "EJKERNEL_OPS_STAMP=json" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_results_before_an_interrupt_are_shown_and_saved(program, capsys, monkeypatch, number):
    calls = []

    def interrupt_the_second(*args, **kwargs):
        calls.append(args)
        if len(calls) > 1:
            os.kill(os.getpid(), number)
        return TuningRun(*args, **kwargs)

    monkeypatch.setattr(in_process, "TuningRun", interrupt_the_second)
    status, _, err = run(capsys, "tune", "--in-process", "program:step", "--cache", "saved")
    assert status == 130
    assert re.search(r"product@v0 .* 8.00x", err)
    assert "stopped" in err
    assert len(list((program / "saved").glob("*/product-v0/*.json"))) == 1
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_first_interrupt_says_that_another_stops_at_once(capsys):
    with commands._announcing_the_stop(commands.messages()):
        for number in (signal.SIGINT, signal.SIGTERM):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "stopping with the best so far, which is saved; Ctrl-C again stops at once"
    assert second == "stopping at once, without the measurements of this search"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_fresh_process_uses_the_saved_configurations(program, capsys):
    run(capsys, "tune", "--in-process", "program:step", "--cache", "saved")
    ask = (
        "import jax.numpy as jnp, program; from ejkernel.ops import default_executor\n"
        "why = default_executor().explain(program.product, jnp.ones((128, 128)), jnp.ones((128, 128)))\n"
        "print(why.source, why.config.repeats)"
    )
    done = forked.python(program, "-c", ask, EJKERNEL_CACHE_DIR=str(program / "saved"))
    assert done.stdout.split() == ["persistent", "1"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("program", "must be MODULE:FUNCTION or a file that exists, got 'program'"),
        ("absent:step", "there is no module 'absent'"),
        ("product:0123456789abcdef", "`ejkernel show --log product:0123456789abcdef` prints its search"),
        ("program:absent", "module 'program' has no 'absent'; it has step, forward, raises, nothing, forgetful."),
        ("program:forwards", "module 'program' has no 'forwards'; did you mean 'forward'?"),
        ("program:forgetful", "must return (callable, args)"),
        ("program:number", "program:number must be a function, got 3"),
        ("program:product", "program:product is a kernel; name a function without arguments that returns a program"),
        ("program:needs_two", "program:needs_two must take no arguments, but it needs a, b"),
        ("program", "the target must be MODULE:FUNCTION or a file that exists, got 'program'."),
        ("program.py", "program.py is a Python file; add the function that returns the program, program.py:FUNCTION."),
        ("program.py:", "program.py is a Python file; add the function"),
        ("./program:step", "there is no file program; did you mean program.py:step?"),
        ("./absent.py:step", "there is no file absent.py; the working directory is "),
        ("./notes.txt:step", "notes.txt is not a Python file"),
        ("./folder", "folder is a folder; pass MODULE:FUNCTION, e.g. folder/FILE.py:FUNCTION"),
        ("program.step", "got 'program.step'; did you mean 'program:step'?"),
        (
            "./folder:step",
            "folder without __init__.py, so it is not a module; pass one of its files, e.g. folder/a",
        ),
        ("./bundle", "bundle is a bundle; measure it with --from bundle"),
        ("./folder/json.py:step", "would be imported as 'json', but that is "),
        ("./folder/a.b.py:step", "a.b.py cannot be imported because its name contains a dot; rename it"),
        (":step", "the target must be MODULE:FUNCTION or a file that exists, got ':step'"),
        ("program:raises", "calling program:raises raised KeyError: 'no such thing'"),
    ],
)
def test_a_bad_target_is_a_clear_error(program, capsys, target, message):
    for name in ("folder/inner.py", "folder/json.py", "folder/a.b.py", "bundle/manifest.json", "notes.txt"):
        (program / name).parent.mkdir(exist_ok=True)
        (program / name).write_text("")
    status, _, err = run(capsys, "tune", "--in-process", target)
    assert status == 1
    assert message in err


@pytest.mark.parametrize(
    ("form", "named"),
    [
        ("program.py", "program"),
        ("./program.py", "program"),
        ("{}/program.py", "program"),
        ("inner/deeper/one.py", "inner.deeper.one"),
        ("./inner/deeper", "inner.deeper"),
        ("loose/two.py", "two"),
        ("with-dash.py", "with-dash"),
    ],
)
def test_a_program_may_be_given_by_the_path_of_its_file_or_folder(program, capsys, form, named):
    files = ("inner/__init__.py", "inner/deeper/__init__.py", "inner/deeper/one.py", "loose/two.py", "with-dash.py")
    for file in files:
        (program / file).parent.mkdir(parents=True, exist_ok=True)
        (program / file).write_text(PROGRAM)
    status, out, err = run(capsys, "tune", "--in-process", f"{form.format(program)}:step", "--dry-run")
    assert status == 0, err
    assert "product.bwd@v0" in out
    assert named in sys.modules
    for name in {named, *named.split(".")[:1], "inner.deeper"}:
        sys.modules.pop(name, None)


@pytest.mark.filterwarnings("default")
def test_a_module_of_kernels_may_be_given_by_its_path_too(program, capsys):
    (program / "empty.mlir").write_text("module {}")
    run(capsys, "tune", "--in-process", "empty.mlir", "--import", "./program.py", "--dry-run")
    assert "program" in sys.modules


OWN_LINES = {
    "calling": ("", "program:raises", "calling program:raises raised KeyError: 'no such thing'"),
    "importing": ("import absent_module\n", "other:step", "importing other raised ModuleNotFoundError: No module"),
    "a syntax error": ("def one(:\n", "other:step", "importing other raised SyntaxError: "),
    "an exit": ("import argparse\nargparse.ArgumentParser().parse_args(['x'])\n", "other:x", "called sys.exit(2)"),
    "an error of ours": (
        "from ejkernel.modules import rms_norm\ndef one():\n    return rms_norm, (1, 2)\n",
        "other:one",
        "ejkernel: error: x must be a floating-point array",
    ),
    "an error of JAX": (
        "import jax\ndef one():\n    return (lambda: jax.numpy.ones(3) @ jax.numpy.ones(4)), ()\n",
        "other:one",
        "lowering the program of other:one raised TypeError: ",
    ),
}


@pytest.mark.parametrize("case", OWN_LINES)
def test_an_error_of_the_program_shows_only_its_own_lines(program, capsys, case):
    text, target, message = OWN_LINES[case]
    (program / "other.py").write_text(text)
    status, out, err = run(capsys, "tune", "--in-process", target)
    sys.modules.pop("other", None)
    assert (status, out) == (1, "")
    assert message in err
    files = re.findall(r'File "([^"]+)"', err)
    own = program / target.replace(":", ".py:").partition(":")[0]
    assert case == "an error of ours" or str(own) in files
    assert set(files) <= {str(own)}
    assert err.count("\n") <= 12


def test_a_result_that_a_full_disk_does_not_take_is_not_called_saved(program, capsys, monkeypatch):
    def full(file, text, **options):
        if file.suffix == ".json" and "bwd" in str(file):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, text, **options)

    def tuned(*options):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(capsys, "tune", "--in-process", "program:step", "--cache", "saved", *options)

    write = persistent.write_file
    monkeypatch.setattr(persistent, "write_file", full)
    status, _, err = tuned()
    assert status == 1
    assert "1 faster than the heuristic, 1 tuned, but not saved; saved in" in err
    assert re.search(
        r"product.bwd@v0 .*: not saved: saved cannot be written: No space left on device; it is kept in /", err
    )
    assert "1 call has no saved configuration yet" in err
    monkeypatch.setattr(persistent, "write_file", write)
    (command,) = re.findall("`ejkernel (cache merge .*)`", err)
    assert "1 entry added" in run(capsys, *command.split())[1]
    assert "2 calls already tuned" in tuned()[2]
    monkeypatch.setattr(persistent, "write_file", full)
    status, _, err = tuned("--force")  # the earlier entry stays
    assert (status, "no saved configuration" in err) == (1, False)


def test_a_folder_that_cannot_be_written_is_an_error_before_anything_is_tuned(program, capsys):
    (program / "file").write_text("")
    status, _, err = run(capsys, "tune", "--in-process", "program:step", "--cache", "file/cache")
    assert status == 1
    assert "cannot be written" in err
    assert "--cache" in err
    assert "tuning" not in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tune"], "MODULE:FUNCTION"),
        (["explain"], "MODULE:FUNCTION"),
        (["explain", "program:step", "--missed"], "pass exactly one of"),
        (["tun"], "No such command 'tun'"),
        (["cache", "prune"], "--older-than, --not-for-this-jax, --failed or --unreadable"),
        (["cache", "prune", "--older-than", "3 days"], "'3 days' is not a duration like 90m, 12h, 30d or 8w"),
        (["cache", "show"], "PREFIX"),
        (["tune", "program:step", "--budget", "nan"], "'nan' is not a number of seconds"),
        (["tune", "program:step", "--budget", "x"], "'x' is not a number of seconds, e.g. 60."),
    ],
)
def test_wrong_usage_is_status_2(capsys, arguments, says):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert says in err


def test_show_lists_saved_configurations_with_their_speed_up(program, capsys):
    run(capsys, "tune", "--in-process", "program:step", "--cache", "saved")
    status, out, _ = run(capsys, "show", "--cache", "saved")
    assert status == 0
    assert "product.bwd@v0" in out
    assert "repeats=1" in out
    _, out, _ = run(capsys, "show", "--cache", "saved", "--json")
    assert {entry["config"]["repeats"] for entry in json.loads(out)} == {1}


def test_show_describes_the_arguments_of_a_call(program, capsys):
    run(capsys, "tune", "--in-process", "program:step", "--cache", "saved")
    _, out, _ = run(capsys, "show", "--cache", "saved")
    assert "arguments" in out
    assert "f32[128,128] x2" in out


def test_show_log_prints_the_status_of_every_candidate_of_the_last_search(program, capsys):
    run(capsys, "tune", "--in-process", "program:step", "--cache", "saved")
    run(capsys, "tune", "--in-process", "program:step", "--cache", "saved", "--force")
    status, out, _ = run(capsys, "show", "--cache", "saved", "--log", "product.bwd")
    assert status == 0
    assert out.count("product.bwd@v0") == 1
    assert "this candidate fails" in out
    key = out.partition("call ")[2][:16]
    assert run(capsys, "show", "--cache", "saved", "--log", key[:6])[1] == out
    for words in (["product.bwd", "--log", key], ["--log", f"product.bwd:{key}"], ["--log", f"product.bwd@v0:{key}"]):
        assert run(capsys, "show", "--cache", "saved", *words)[1] == out
    status, _, err = run(capsys, "show", "--cache", "saved", "product", "--log", f"product:{key}")
    assert (status, f"starts with 'product' and 'product:{key}'" in err) == (1, True)
    _, out, _ = run(capsys, "show", "--cache", "saved", "--log", key, "--json")
    (search,) = json.loads(out)
    repeats = [outcome["config"]["repeats"] for outcome in search["outcomes"] if outcome["twin"] is None]
    assert repeats == [8, 1, 0, -1]
    assert {outcome["status"] for outcome in search["outcomes"]} >= {"measured", "failed"}
    assert search.keys().isdisjoint({"path", "is_only_here"})
    figures = search["challenge"]["comparison"]
    assert figures["pairs"] >= figures["ahead"] + figures["behind"]
    assert (search["interrupted"], search["in_force"]) == (False, search["outcomes"][search["winner_index"]]["config"])


def test_show_log_of_a_call_without_a_search_is_an_error(program, capsys):
    run(capsys, "tune", "--in-process", "program:step", "--cache", "saved")
    status, out, err = run(capsys, "show", "--cache", "saved", "--log", "nothing")
    assert (status, out) == (1, "")
    assert "'nothing'" in err


def test_show_of_an_empty_folder_is_a_clear_failure(tmp_path, capsys):
    status, out, _ = run(capsys, "show", "--cache", str(tmp_path))
    assert status == 1
    assert "No saved configurations" in out
    assert run(capsys, "show", "--json", "--cache", str(tmp_path))[:2] == (1, "[]\n")


@pytest.fixture
def ray_of_one(monkeypatch):
    """Stands in for a cluster: a thread of this process."""

    class Thread(concurrent.futures.ThreadPoolExecutor):
        def __init__(self, address):
            addresses.append(address)
            super().__init__(1)

    addresses = []
    monkeypatch.setattr(ray_executor, "RayExecutor", Thread)
    monkeypatch.setattr(ray_executor, "check_installed", lambda: None)
    return addresses


@pytest.mark.filterwarnings("default")
def test_the_workers_of_a_cluster_find_the_calls_and_tune_them(program, capsys, ray_of_one):
    (program / "program.py").write_text(PROGRAM + "\n\nimport warnings\nwarnings.warn('imported')")
    status, out, err = run(capsys, "tune", "--ray", "head:6379", "program:forward", "--cache", "saved")
    assert err.startswith("connecting to Ray at head:6379\n")
    assert "warning: imported" in err
    assert (status, ray_of_one) == (0, ["head:6379"])
    assert "1 wrong, 1 failed" in out
    assert "1 call in " in err
    assert len(list((program / "saved").rglob("*.json"))) == 1


def test_a_missing_module_on_a_cluster_s_worker_is_an_error(program, capsys, ray_of_one):
    (program / "program.py").write_text("import no_such_module")
    status, _, err = run(capsys, "tune", "--ray", "head:6379", "program:forward", "--cache", "saved")
    assert status == 1
    assert "No module named 'no_such_module'" in err


@pytest.mark.parametrize("other", [("--in-process",), ("--devices", "2"), ("--mesh-devices", "2")])
def test_a_cluster_s_workers_are_not_this_process_s(capsys, other):
    status, _, err = run(capsys, "tune", "program:forward", "--ray", "auto", *other)
    assert status == 2
    assert "--ray cannot be used with --in-process, --devices or --mesh-devices" in err


def test_without_ray_the_command_names_the_package_to_install(program, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    status, _, err = run(capsys, "tune", "program:forward", "--ray", "auto", "--cache", "saved")
    assert status == 1
    assert "Ray is not installed" in err
    assert "connecting" not in err
