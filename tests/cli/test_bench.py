# SPDX-License-Identifier: Apache-2.0
"""`ejkernel bench`: the builds that it compares, and its output. No test looks at a time."""

from __future__ import annotations

import functools
import json
import mmap
import re
import sys
import tracemalloc
import types

import jax.numpy as jnp
import pytest

from ejkernel.cli import bench as cli_bench
from ejkernel.cli import builds, main, peaks, rounds
from ejkernel.ops import Invocation, PersistentCache, autotune, default_executor
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.execution.discovery import of_arrays

PROGRAM = """
import jax
import jax.numpy as jnp
from ejkernel.ops import tune

@tune(space={"rows": [1, 2]})
def benched(x, *, rows=1):
    return x * rows


STEP = jax.jit(lambda x: benched(x))
DONATING = jax.jit(lambda x, y: (benched(x), y), donate_argnums=0)
STATIC = jax.jit(lambda x, times: benched(x) * times, static_argnums=1)
SMALL = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def step():
    print("a program may print")
    return STEP, (SMALL,)


def donating():
    return DONATING, (jnp.ones((4, 4)),), {"y": SMALL}


def static():
    return STATIC, (SMALL, 3)


def eager():
    return lambda x, name: benched(x), (SMALL, "a name")


def plain():
    return jax.jit(lambda x: x * 2), (SMALL,)


def printing():
    def step(x):
        jax.debug.print("the sum is {}", x.sum())
        return benched(x)

    return jax.jit(step), (SMALL,)


def other():
    return jax.jit(lambda x: x[0]), (SMALL,)


def equinox():
    import equinox as eqx

    model = eqx.nn.MLP(4, 4, 4, 1, jax.nn.gelu, key=jax.random.key(0))

    @eqx.filter_jit
    def step(model, x):
        loss, gradient = eqx.filter_value_and_grad(lambda model: jax.vmap(model)(benched(x)).sum())(model)
        return loss, eqx.apply_updates(model, gradient)

    return step, (model, SMALL)


def tokens():
    return jax.jit(lambda x, t: benched(x)[t]), (SMALL, jax.ShapeDtypeStruct((2,), jnp.int32))


def variances():
    return jax.jit(lambda x: jnp.sqrt(benched(x))), (SMALL,)


def given():
    return jax.jit(lambda x: jnp.log(x) + benched(x)), (-jnp.ones((4, 4)),)


def refused():
    raise RuntimeError("no plain step")


def broken():
    def step(x):
        raise RuntimeError("is not supported\\nand more")

    return step, (SMALL,)


@jax.tree_util.register_pytree_node_class
class Model:
    def __init__(self, w):
        self.w = w

    def tree_flatten(self):
        return (self.w,), None

    @classmethod
    def tree_unflatten(cls, aux, leaves):
        return cls(*leaves)


def mutating():
    def step(model, x):
        model.w = model.w @ x  # the only product
        return benched(x).sum()

    return step, (Model(jnp.ones((4, 4))), SMALL)


def failing():
    return jax.jit(lambda x: jax.pure_callback(lambda x: 1 / 0, x, x)), (SMALL,)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a program, and the working directory; `tuned` holds the configuration rows=2 for its call."""
    (tmp_path / "benched_program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    import benched_program as program

    inv = Invocation(kernel=program.benched, args=(jnp.ones((4, 4)),))
    config = type(program.benched.heuristic_cfg(inv))(rows=2)
    PersistentCache(tmp_path / "tuned").put(inv.key, config)
    (tmp_path / "empty").mkdir()
    yield program
    del sys.modules["benched_program"]


@pytest.fixture
def bench(folder, capsys):
    """Return a function that runs the command with few rounds and returns its status, output and messages."""

    def run(target, *arguments, cache="tuned"):
        options = ["--rounds", "6", "--seconds", "0", "--cache", cache]
        status = main(["bench", f"benched_program:{target}", *options, *arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def test_untuned_runs_the_heuristic_and_tuned_the_saved_configuration(bench, monkeypatch):
    before, ran = default_executor(), {}

    def step(build, number):
        (x,), _ = build.arguments
        ran[build.name] = float((build.compiled(x) / x).mean())
        build.samples.append(1.0)

    monkeypatch.setattr("ejkernel.cli.builds.Build.step", step)
    status, out, _ = bench("step", "--baseline", "benched_program:plain", "--per-step", "16", "--json")
    found = json.loads(out)
    assert status == 0
    assert ran == {"baseline": 2.0, "untuned": 1.0, "tuned": 2.0}
    assert [build["name"] for build in found["builds"]] == ["baseline", "untuned", "tuned"]
    assert [len(build["samples"]) for build in found["builds"]] == [6, 6, 6]
    for build in found["builds"]:
        assert build["peak_bytes"] >= 128  # argument and result
        assert build["per_second"] == pytest.approx(16 / build["seconds"])
    assert (found["reference"], found["calls"], found["measured_calls"], found["changed"]) == ("tuned", 1, 1, True)
    assert len(found["conclusions"]) >= 2
    assert default_executor() is before


def test_a_program_without_saved_configurations_runs_untuned_with_the_advice_to_tune(bench):
    status, out, err = bench("step", "--per-step", "16", "--unit", "tokens", cache="empty")
    assert status == 0
    assert out.splitlines()[0].endswith("tokens/s")
    command = "ejkernel tune benched_program:step --cache empty"
    assert f"tuned: no saved configuration yet; run `{command}`, again if searches did not finish\n" in out
    assert "a program may print" in err


def test_lines_that_steps_print_appear_once_for_each_build(bench):
    status, out, err = bench("printing")
    assert status == 0
    assert "the sum is" not in out
    assert err.count("the sum is") == 2  # untuned and tuned
    # 8 rounds with warm-up, and the steps whose results are compared
    assert "left out 18 lines that the steps printed; their printing is part of the times" in err


def test_unfinished_lines_and_lines_before_an_error_are_counted(capsys):
    def step():
        print("first\nsecond", end="")
        print(", still the second")
        print("third", end="")
        raise ArithmeticError

    with pytest.raises(ArithmeticError), builds.prints_left_out():
        step()
    out, err = capsys.readouterr()
    assert (out, err[:22]) == ("", "left out 3 lines that ")


def test_lines_left_out_take_no_memory(capsys):
    tracemalloc.start()
    try:
        with builds.prints_left_out():
            for _ in range(50):
                print("x" * 100_000)
            held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1_000_000
    assert "left out 50 lines that" in capsys.readouterr().err


def test_a_program_whose_configurations_are_the_heuristic_s_runs_once(bench, folder):
    inv = Invocation(kernel=folder.benched, args=(jnp.ones((4, 4)),))
    PersistentCache("empty").put(inv.key, folder.benched.heuristic_cfg(inv))
    found = json.loads(bench("step", "--json", cache="empty")[1])
    assert [build["name"] for build in found["builds"]] == ["tuned"]
    assert found["missing"]["untuned"].startswith("the same program as tuned")
    assert not found["changed"]


@pytest.mark.parametrize(
    ("sources", "which"),
    [(("persistent",) * 2, "every call"), (("persistent", "heuristic", "heuristic"), "1 of 3 calls; 2 not tuned")],
)
def test_only_tuned_calls_are_said_to_keep_the_heuristic(sources, which):
    tuned = [types.SimpleNamespace(source=source) for source in sources]
    text = f"the same program as tuned: tuning kept the heuristic's configuration for {which}"
    assert cli_bench._why_same(tuned) == text


def test_an_operation_s_implementations_run_beside_its_reference(capsys):
    call = ["--op", "rms_norm", "--shape", "f32[8,16]", "--shape", "f32[16]", "--kwargs", '{"eps": 0.1}']
    assert main(["bench", *call, "--rounds", "6", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [build["name"] for build in found["builds"]] == ["reference", "chosen"]
    assert found["missing"]["xla"] == "the same program as chosen"
    assert found["flops"] > 0
    assert "implementation=xla" in found["builds"][1]["configurations"][0]


def test_an_operation_that_is_slower_than_its_reference_is_said_to_be(capsys, monkeypatch):
    over = {"median": 0.21, "low": 0.2, "high": 0.22}
    real = rounds.compared
    monkeypatch.setattr(
        cli_bench,
        "compared",
        lambda *args: (found := real(*args), found.over.__setitem__("reference", over))[0],
    )
    call = ["--op", "rms_norm", "--shape", "f32[8,16]", "--shape", "f32[16]"]
    assert main(["bench", *call, "--rounds", "6"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "The chosen program is SLOWER than the reference: 0.21 times as fast (0.20 to 0.22). For this call" in printed
    )
    assert "Slow programs" not in printed


@pytest.mark.slow
def test_an_operation_is_compared_with_the_measured_peak_of_the_device(capsys, monkeypatch):
    monkeypatch.setattr(peaks, "_least", lambda function, *args: 1.0)  # a millisecond for the product and for the copy
    monkeypatch.setattr(peaks, "_measured", functools.cache(peaks._measured.__wrapped__))
    call = ["--op", "rms_norm", "--shape", "f32[8,16]", "--rounds", "6", "--measure-peak"]
    assert main(["bench", *call]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "of roofline" in printed
    assert "the call is limited by memory" in printed
    assert "2.15 TFLOP/s and 134 GB/s (measured here" in printed
    assert main(["bench", *call, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak"]["dtype"] == "float32"


LOSS = ["--shape", "f32[8,4]", "--shape", "f32[4,16]", "--shape", "i32[8]", "--rounds", "6", "--json"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more", "calls"),
    [
        ("linear_cross_entropy", ["--gradient"], "linear_cross_entropy_gradients"),
        ("linear_cross_entropy_gradients", [], "linear_cross_entropy_gradients"),
        ("linear_cross_entropy_gradients", ["--gradient"], "linear_cross_entropy_gradients"),
        ("token_log_probs", [], "linear_cross_entropy"),
        ("linear_cross_entropy", [], "linear_cross_entropy"),
    ],
)
def test_the_gradient_of_a_loss_is_the_call_of_a_training_step(capsys, name, more, calls):
    assert main(["bench", "--op", name, *LOSS, *more]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["op"] == f"{calls}@v0"
    assert found["builds"][-1]["configurations"][0].startswith("implementation=xla")
    assert ("A program that differentiates a mean or a sum" in found["note"]) == bool(more)


@pytest.mark.slow
def test_the_gradient_of_losses_per_token_is_measured_by_their_name(capsys):
    assert main(["bench", "--op", "token_log_probs", *LOSS, "--gradient"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["op"], found["note"]) == ("linear_cross_entropy@v0", "")
    assert len(found["builds"][-1]["configurations"]) == 2  # forward and backward


def test_without_a_known_peak_the_command_names_the_option(capsys):
    assert main(["bench", "--op", "rms_norm", "--shape", "f32[8,16]", "--rounds", "6"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "The peak of this device is not known; --measure-peak measures it." in printed
    assert "of roofline" not in printed


def test_a_round_runs_each_step_once_and_the_order_changes():
    order = []
    rounds.run_rounds([lambda n, name=name: order.append(name) for name in "abc"], 4)
    assert "".join(order) == "abccbabcaacbcabbac"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["donating", "static", "eager", "equinox"])
def test_donated_and_static_arguments_and_functions_without_jit_run(bench, target):
    status, out, _ = bench(target)
    assert status == 0
    assert "\ntuned " in out
    assert "DIFFER" in out  # the results were compared


def test_the_values_of_integers_given_by_type_are_named(bench):
    text = "The integer inputs given by type alone (i32[2]) were random zeros and ones."
    assert text in bench("tokens")[1]
    assert "random" not in bench("step")[1]


def test_nan_from_random_inputs_is_explained_and_equal_in_both_builds(bench):
    found = json.loads(bench("variances", "--json")[1])
    said = " ".join(found["conclusions"])
    assert "Some results are NaN. Inputs given by type alone are normal random numbers" in said
    assert "DIFFER" in said  # sqrt(2 x) is not sqrt(x) where both are numbers
    assert found["apart"]["untuned"] == pytest.approx(1 - 0.5**0.5, rel=1e-5)
    assert "Some results are NaN." in json.loads(bench("given", "--json")[1])["conclusions"]


def test_arrays_that_a_step_stores_in_its_arguments_are_results(folder):
    """XLA would leave out the update of a model that a step of Flax NNX changes in place."""
    function, args = folder.mutating()
    compiled, arrays, _ = of_arrays(function, args, {})
    result, stored = compiled(*map(jnp.ones_like, arrays))
    assert float(result) == 16.0
    assert stored.tolist() == [[4.0] * 4] * 4
    lowered = compiled.lower(*map(jnp.ones_like, arrays))
    assert "dot_general" in lowered.as_text()


def test_results_of_builds_are_compared(bench):
    """The configuration changes the result here, by 2: the program is wrong."""
    found = json.loads(bench("step", "--baseline", "benched_program:plain", "--json")[1])
    assert found["apart"] == {"baseline": 0.0, "untuned": 0.5}
    said = " ".join(found["conclusions"])
    agree = "The results of baseline and tuned agree to 0.0e+00 of their norm: after one step with the same random"
    assert agree in said
    assert "The results of untuned and tuned DIFFER by 0.5 of their norm: do both compute the same?" in said


def test_other_shapes_of_results_are_not_compared(bench):
    out = bench("step", "--baseline", "benched_program:other", cache="empty")[1]
    assert "The results of baseline and untuned were not compared" in out


@pytest.mark.parametrize(
    ("baseline", "reason"),
    [("broken", "compiling benched_program:broken raised RuntimeError: is not supported\n"), ("failing", "running ")],
)
def test_a_baseline_that_does_not_run_is_a_line_with_the_reason(bench, baseline, reason):
    status, out, _ = bench("step", "--baseline", f"benched_program:{baseline}", cache="empty")
    assert status == 0
    assert f"\nbaseline: {reason}" in out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["plain"], 1, "the program of benched_program:plain made no call of an operation that can be tuned."),
        (["absent"], 1, "module 'benched_program' has no 'absent'; it has step, donating, static, eager, plain"),
        (["step", "--baseline", "benched_program:refused"], 1, "calling benched_program:refused raised RuntimeError"),
        (["step", "--baseline", "plain"], 1, "--baseline: the target must be MODULE:FUNCTION"),
        (["step", "--op", "rms_norm"], 2, "pass exactly one of MODULE:FUNCTION and --op."),
        (["step", "--gradient"], 2, "--shape, --kwargs, --gradient, --measure-peak and --import require --op."),
        (["step", "--kwargs", "{}"], 2, "--shape, --kwargs, --gradient, --measure-peak and --import require --op."),
        (["step", "--unit", "tokens"], 2, "--unit requires --per-step."),
        (["step", "--rounds", "5"], 2, "5 is not in the range x>=6."),
    ],
)
def test_errors_name_the_mistake(bench, arguments, status, message):
    found, out, err = bench(*arguments)
    assert (found, out) == (status, "")
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["rms_norm"], 2, "--op requires --shape for each array, e.g. --shape bf16[4,1024,8,64]."),
        (["rms_norm", "--shape", "f32[8]", "--baseline", "a:b"], 2, "--baseline requires MODULE:FUNCTION"),
        (["rms_nrm", "--shape", "f32[8]"], 1, "did you mean 'rms_norm'?"),
        (
            ["linear_cross_entropy", "--gradient", *LOSS[:6], "--kwargs", '{"reduction": "mean"}'],
            1,
            "linear_cross_entropy_gradients has no argument `reduction`",
        ),
        (["rms_norm", "--shape", "f32[8,16]", "--shape", "f32[5]"], 1, "rms_norm(f32[8,16], f32[5]): "),
        (
            ["rms_norm", "--shape", "4x8"],
            1,
            "--shape must be an array with its dtype, e.g. bf16[4,8] or f32[], got '4x8'.",
        ),
        (
            ["rms_norm", "--shape", "f32[8,16]", "--kwargs", "eps=1"],
            1,
            "--kwargs must be JSON such as '{\"causal\": true}', got 'eps=1'.",
        ),
    ],
)
def test_errors_of_an_operation_name_the_mistake(capsys, arguments, status, message):
    assert main(["bench", "--op", *arguments]) == status
    assert message in capsys.readouterr().err


def test_each_time_of_a_row_has_its_own_unit(monkeypatch):
    monkeypatch.setattr(cli_bench, "peak_bytes", lambda compiled: None)
    samples = [0.0009, 0.0009, 0.002, 0.002, 0.0009, 0.002, 0.0009, 0.002]
    build = types.SimpleNamespace(name="tuned", compiled=None, compile_seconds=1.0)
    cells = cli_bench._row(build, rounds.compared({"tuned": samples}, "tuned"))
    assert re.findall(r"[mu]s\b", " ".join(cells)) == ["ms", "us", "ms"]


def made(name, mebibytes):
    """Return a build whose steps map that much memory anew."""

    def step():
        memory = mmap.mmap(-1, (mebibytes << 20) + 1)
        for page in range(0, len(memory), mmap.PAGESIZE):
            memory[page] = 1

    return builds.Build(name=name, compiled=step, arguments=((), {}), donated=[], compile_seconds=0.0, calls=[])


def test_memory_that_steps_map_anew_is_reported_with_the_remedy(monkeypatch):
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    heavy, light = made("tuned", 40), made("untuned", 0)
    for number in range(5):
        heavy.step(number)
        light.step(number)
    text = builds.of_mapping([light, heavy])
    assert re.search(r"untuned little, tuned 4\d(\.\d)? MiB \([0-9.]+ m?s of system time\)", text)
    assert "MALLOC_TRIM_THRESHOLD_" in text
    assert builds.of_mapping([light]) == ""
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    assert builds.of_mapping([light, heavy]) == ""


def test_a_function_that_returns_a_step_is_no_step(folder):
    with pytest.raises(ArgumentError, match=r"returns a function and its arguments.*`step, args = step\(\)`"):
        autotune(folder.step)
