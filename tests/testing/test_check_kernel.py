# SPDX-License-Identifier: Apache-2.0
"""`check_kernel` finds the defect of wrong kernels, and passes correct kernels of every form."""

from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests import document_kernels
from tests.ops import sample_kernels, wrong_kernels

from ejkernel.modules import LayerNorm
from ejkernel.modules.flash_attention import _flash_attention
from ejkernel.modules.rms_norm import _rms_norm
from ejkernel.ops import ArgumentError, KernelCheckError
from ejkernel.testing import CheckRow, check_kernel, paired
from ejkernel.testing.programs import named_after
from ejkernel.testing.report import CheckReport
from ejkernel.testing.rows import GROUPS
from ejkernel.testing.subject import Subject

pytestmark = pytest.mark.slow

_rng = np.random.default_rng(0)
x, w = (_rng.standard_normal(shape, np.float32) for shape in ((4, 5), (5, 3)))
index, mask = np.array([0, 2, 2, 1]), np.array([True, False, True, True])


def only(*groups):
    """Return the groups to leave out so that these are left."""
    return [group for group in GROUPS if group not in groups]


def failed(kernel, *args, **options):
    """Return the checks that fail, in order, each once."""
    report = check_kernel(kernel, *args, strict=False, **options)
    return list(dict.fromkeys(row.check for row in report.failures))


# --- wrong kernels ---

GRADIENT, VMAP = only("gradient"), only("vmap")
WRONG = {
    "GradientOfOneArgument": (["gradient of w"], GRADIENT),
    "ForgottenGradient": (["gradient of w"], GRADIENT),
    "GradientOfOneConfiguration": (["gradient of x"], GRADIENT),
    "GradientOfResiduals": (["gradient of x", "gradient of w"], GRADIENT),
    "ForwardWithResiduals": (["under grad"], GRADIENT),
    "NoTuple": (["gradient"], GRADIENT),
    "RaisingRule": (["gradient"], GRADIENT),
    "DtypeOfGradient": (["gradient of x", "gradient of w", "gradient types"], GRADIENT),
    "WideReference": (["gradient of w"], GRADIENT),
    "WrongUndifferentiableWithRule": (["gradient, by differences"], GRADIENT),
    "WrongUnderVmapOfGrad": (["vmap", "vmap of vmap", "vmap over w"], only("gradient", "vmap")),
    "OneConfiguration": (["outputs", "jit"], GROUPS),
    "RaisingConfiguration": (["types"], GROUPS),
    "Exiting": (["types"], GROUPS),
    "TypeOfConfiguration": (["types"], GROUPS),
    "TypeOfSecondResult": (["types"], GROUPS),
    "StructureOfConfiguration": (["types"], GROUPS),
    "WrongReference": (["outputs", "jit"], GROUPS),
    "Nan": (["outputs", "jit"], GROUPS),
    "Random": (["outputs", "jit"], GROUPS),
    "Counting": (["outputs", "repeated", "jit"], GROUPS),
    "Leaking": (["outputs"], GROUPS),
    "NoSpace": (["configurations"], GROUPS),
    "RaisingHeuristic": (["configurations"], GROUPS),
    "UnderVmap": (["vmap", "vmap of vmap", "vmap over x", "vmap over w"], VMAP),
    "UnderVmapAlone": (["vmap, no gradient"], only("gradient", "vmap")),
    "ForZerosAlone": (["zeros", "zeros in x", "zeros in w", "odd sizes, no gradient"], only("gradient", "inputs")),
    "BatchedSecond": (["vmap over w"], VMAP),
    "WrongTangents": (["tangents"], only("tangents")),
    "WeaklyTyped": (["weak types"], only("dtypes")),
    "ImpreciseInHalf": (["bfloat16"], only("dtypes")),
    "TritonThatRaises": (["lowered for gpu"], only("platforms")),
    "EvenForTriton": (["lowered for gpu, odd sizes"], only("platforms")),
    "Unpicklable": (["pickle"], only("pickle")),
    "Forgetful": (["pickle"], only("pickle")),
}


def make(name):
    return getattr(wrong_kernels, name)(*([2.0] if name == "Forgetful" else []))


@pytest.mark.parametrize("name", WRONG)
def test_check_kernel_locates_the_error_of_a_wrong_kernel(name):
    checks, without = WRONG[name]
    assert failed(make(name), x, w, without=without) == checks


def test_each_wrong_kernel_is_tried():
    kinds = {name for name, value in vars(wrong_kernels).items() if getattr(value, "is_wrong", False)}
    assert kinds == set(WRONG) | {"TakeWithoutMask", "InPlace", "MisalignedForTpu", "ExitingHeuristic"}


def test_an_exit_outside_of_run_is_an_error():
    with pytest.raises(RuntimeError, match="the kernel would end the process: KeyboardInterrupt"):
        check_kernel(wrong_kernels.ExitingHeuristic(), x, w)


def test_without_a_reference_a_rule_inside_the_function_is_compared_with_differences():
    assert failed(wrong_kernels.wrong_inside, x, without=GRADIENT) == ["gradient, by differences"]


def test_an_ignored_mask_is_found():
    assert failed(wrong_kernels.TakeWithoutMask(), x, index, mask, without=GROUPS) == ["outputs", "jit"]


def test_an_overwritten_argument_is_found_and_restored(monkeypatch):
    kernel, elements = wrong_kernels.InPlace(), Subject.elements

    def noted(subject, count):
        made = elements(subject, count)
        kernel.address = kernel.address or made[0][0].unsafe_buffer_pointer()
        return made

    monkeypatch.setattr(Subject, "elements", noted)
    report = check_kernel(kernel, x, w, strict=False, without=GROUPS)
    changed = [row for row in report.failures if row.check == "arguments"]
    assert [row.reason for row in changed] == ["the call modifies its argument x"]


def test_a_platform_that_a_kernel_has_a_form_for_is_lowered_for_under_each_configuration():
    args = np.ones((16, 128), np.float32)
    assert failed(wrong_kernels.ForTpu(), args, without=only("platforms")) == []
    report = check_kernel(wrong_kernels.MisalignedForTpu(), args, strict=False, without=only("platforms"))
    assert [(row.check, row.config) for row in report.failures] == [("lowered for tpu", 4)]


def test_a_kernel_for_another_platform_than_this_process_has_is_lowered_for_it():
    report = check_kernel(wrong_kernels.OnlyForGpu(), x, w)
    statuses = {row.check: row.status for row in report.rows}
    assert (statuses["outputs"], statuses["lowered for gpu"], statuses["key"]) == ("skipped", "ok", "ok")


def test_a_static_argument_without_a_name_is_found():
    kernel = wrong_kernels.Activated()
    assert failed(kernel, x, w, activation=jnp.tanh, without=only("key")) == []
    with pytest.warns(match="activation|lambda"):
        assert failed(kernel, x, w, activation=lambda y: y, without=only("key")) == ["key"]


def test_a_function_that_no_other_process_finds_is_found():
    kernel = wrong_kernels.made_inside()
    report = check_kernel(kernel, x, strict=False, without=only("pickle"))
    assert "cannot be sent to a worker process" in report.failures[0].reason


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "GradientOfOneArgument",
            r"the gradient of w differs from JAX's gradient of `run`: .* relative \(allowed: 0.002\)",
        ),
        ("DtypeOfGradient", r"the gradient of w is float16, but w is float32; return it as float32"),
        ("ForgottenGradient", r"the gradient of w differs from JAX's gradient of `run`: 0 instead of"),
        ("WrongUndifferentiableWithRule", r"the gradient of w differs from finite differences: .* relative"),
        ("TypeOfConfiguration", r"the results are float16\[4,3\]; under the heuristic float32\[4,3\]"),
        (
            "TypeOfSecondResult",
            r"are float32\[4,3\], float16\[4,3\];\s+under\s+the\s+heuristic\s+float32\[4,3\],\s+float32",
        ),
        ("StructureOfConfiguration", r"are float32\[4,3\] in PyTreeDef\(\[\*\]\);\s+under\s+the\s+heuristic\s+float32"),
        ("Nan", r"result 0 has NaN, and no reference confirms it"),
        (
            "NoSpace",
            r"the\s+result\s+of\s+config_space\s+must be a list of\s+configurations or a ConfigSpace, got None",
        ),
        ("ForZerosAlone", r"result 0 without a gradient differs from the reference: nan instead of 0"),
        ("WrongReference", r"result 0 differs from the reference: .* instead of"),
    ],
)
def test_the_reason_names_the_argument_and_says_how_far_it_is_off(name, text):
    with pytest.raises(KernelCheckError, match=f"(?s){text}") as caught:
        check_kernel(make(name), x, w, without=WRONG[name][1])
    assert caught.value.report.failures


def test_the_row_of_a_failure_names_the_configuration():
    report = check_kernel(wrong_kernels.GradientOfOneConfiguration(), x, w, strict=False, without=GRADIENT)
    assert [row.config for row in report.failures] == [1]
    assert report.failures[0].error > report.failures[0].allowed


# --- right kernels ---

RIGHT = {
    "with residuals": (sample_kernels.WithResiduals(), (x, w), {}),
    "of one argument": (document_kernels.DOUBLE, (document_kernels.X,), {}),
    "integers and booleans": (wrong_kernels.Take(), (x, index, mask), {}),
    "containers": (wrong_kernels.Trees(), ((x, x), {"scale": x[0, 0], "count": index[0]}), {"shift": x}),
    "undifferentiable": (wrong_kernels.Undifferentiable(), (x, w), {}),
    "with a rule alone": (wrong_kernels.UndifferentiableWithRule(), (x, w), {}),
    "for float32": (wrong_kernels.Float32Alone(), (x, w), {}),
    "function": (wrong_kernels.right_sine, (x,), {}),
    "function with its configuration": (wrong_kernels.right_sine, (x,), {"rows": 2}),
    "of random keys": (wrong_kernels.Dropout(), (x, jax.random.key(0, impl="rbg")), {}),
    "rms_norm": (_rms_norm, (x, x[0]), {"eps": 1e-5}),
}
RIGHT_IN_NUMBERS = {
    "plain": (sample_kernels.Plain(), (x, w), {}),
    "with a rule": (sample_kernels.WithRule(), (x, w), {}),
    "of the documents": (document_kernels.MATMUL, (document_kernels.A, document_kernels.B), {}),
    "by keyword": (document_kernels.DOUBLE, (), {"x": document_kernels.X}),
    "abstract": (sample_kernels.WithRule(), [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, w)], {}),
    "with a wide reference": (wrong_kernels.RightWithWideReference(), (x, w), {}),
    "bfloat16": (sample_kernels.WithRule(), (x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)), {}),
}


@pytest.mark.parametrize("name", RIGHT_IN_NUMBERS)
def test_a_right_kernel_is_right_in_each_number(name):
    kernel, args, kwargs = RIGHT_IN_NUMBERS[name]
    assert check_kernel(kernel, *args, **kwargs, without=only("gradient", "tangents", "vmap")).ok


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_passes(name):
    kernel, args, kwargs = RIGHT[name]
    report = check_kernel(kernel, *args, **kwargs)
    assert report.ok
    assert {row.status for row in report.rows} <= {"ok", "skipped"}


@pytest.mark.whole  # the conformance suite checks attention with the same rows
def test_attention_passes():
    q, k, v = (_rng.standard_normal((1, 8, heads, 4), np.float32) for heads in (4, 2, 2))
    assert check_kernel(_flash_attention, q, k, v, causal=True, without=["tangents", "dtypes"]).ok


@pytest.mark.parametrize(
    ("name", "check", "reason"),
    [
        ("undifferentiable", "gradient", "JAX could not differentiate its run: ValueError: Pure callbacks"),
        ("undifferentiable", "export", "serialization of host_callbacks"),
        ("of random keys", "vmap", "under vmap, random keys of this kind give different numbers"),
        ("for float32", "bfloat16", "not supported: UnsupportedError: x must be float32"),
        ("with a rule alone", "tangents", "no tangents: ValueError: Pure callbacks"),
    ],
)
def test_checks_that_do_not_apply_are_rows_with_the_reason(name, check, reason):
    kernel, args, kwargs = RIGHT[name]
    groups = {"bfloat16": "dtypes"}
    report = check_kernel(kernel, *args, **kwargs, without=only(groups.get(check, check)))
    assert [(row.status, reason in row.reason) for row in report.rows if row.check == check] == [("skipped", True)]


def test_unavailable_group_is_skipped_with_the_reason_of_the_caller_or_the_implementation(monkeypatch):
    report = check_kernel(wrong_kernels.UnderVmap(), x, w, unavailable={"vmap": "one example"}, without=only("vmap"))
    assert [(row.status, row.reason) for row in report.rows if "vmap" in row.check] == [("skipped", "one example")]
    xla = type(_rms_norm.implementations["xla"])
    monkeypatch.setattr(xla, "unavailable", {"export": "calls Python"})
    report = check_kernel(_rms_norm, x, x[0], configs=[], without=only("export"))
    assert [(row.status, row.reason) for row in report.rows if row.check == "export"] == [("skipped", "calls Python")]


def test_paired_implementation_takes_the_backward_of_another(monkeypatch):
    pallas, xla = (LayerNorm.implementations[name] for name in ("pallas", "xla"))
    monkeypatch.setattr(type(pallas), "forward", lambda self, *args, params: xla.forward(*args, params=params))
    norm = paired(LayerNorm(), "pallas", backward="xla", simulated=True)
    assert failed(norm, x, x[0], x[1], without=GRADIENT) == []
    monkeypatch.setattr(type(xla), "backward", lambda self, call, residuals, out, cts, *args, params: args)
    assert failed(norm, x, x[0], x[1], without=GRADIENT) == [f"gradient of {name}" for name in ("x", "weight", "bias")]
    monkeypatch.setattr(type(pallas), "residuals", "the mean alone")
    with pytest.raises(ArgumentError, match=r"backward must take the residuals of 'xla'.*got 'pallas'"):
        paired(LayerNorm(), "xla", backward="pallas")


def test_the_report_mentions_a_sample_of_a_large_space():
    report = check_kernel(wrong_kernels.of_many, x, without=GROUPS)
    assert len(report.configs) == 25
    assert "the heuristic and 24 of about 100 configurations, at random" in str(report)
    assert "pairs of forward and backward, scaled inputs, zeros, odd sizes, other dtypes: 21 of 25 configurations" in (
        report.not_checked
    )
    assert "second derivatives, nested batches, batches of one array: 23 of 25 configurations" in report.not_checked


def test_configurations_may_be_given():
    report = check_kernel(wrong_kernels.right_sine, x, configs=[{"rows": 4}], without=GROUPS)
    assert report.configs == ({"rows": 1}, {"rows": 4})


def test_nothing_is_remembered_or_recorded(executor):
    from ejkernel.ops import default_executor, get_invocations

    check_kernel(wrong_kernels.right_sine, x, without=only("vmap", "gradient"))
    assert list(default_executor().chooser.cache.items()) == []
    assert not any(get_invocations().values())


# --- the report ---


def test_a_non_strict_report_is_returned():
    report = check_kernel(wrong_kernels.OneConfiguration(), x, w, strict=False, without=GROUPS)
    assert not report.ok
    with pytest.raises(AssertionError, match="OneConfiguration@v0") as caught:
        report.raise_if_failed()
    assert caught.value.report is report
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("name", ["WrongReference", "RaisingRule", "Unpicklable"])
def test_the_table_fits_eighty_columns(name):
    report = check_kernel(make(name), x, w, strict=False, without=WRONG[name][1])
    assert max(map(len, str(report).splitlines())) <= 80


def test_the_table_has_a_line_for_each_check_and_the_reasons_below():
    rows = [CheckRow(check="outputs", config={"rows": n}, status="ok", error=n * 1e-6, allowed=1e-4) for n in (1, 2)]
    reason = "result 0 differs"
    rows += [CheckRow(check="vmap", config={"rows": 1}, status="failed", reason=reason, error=0.5, allowed=1e-4)]
    rows += [CheckRow(check="vmap", config={"rows": 2}, status="failed", reason=reason, error=0.1, allowed=1e-4)]
    rows += [CheckRow(check="vmap", config={"rows": 4}, status="ok", error=1e-7, allowed=1e-4)]
    rows += [CheckRow(check="pickle", config=None, status="skipped", reason="a script's own")]
    assert str(CheckReport("sine@v0 f32[4]", ({"rows": 1}, {"rows": 2}), tuple(rows))).splitlines() == [
        "sine@v0 f32[4]: 2 configurations, 1 of 3 checks failed (2 of 5 runs)",
        "check    status   worst error  allowed  runs",
        "outputs  ok       2e-06        0.0001   2",
        "vmap     failed   0.5          0.0001   2 of 3",
        "    rows=1 and 1 more: result 0 differs",
        "pickle   skipped  -            -        -",
        "    a script's own",
        "what to do:",
        "    vmap: under vmap `run` sees one example at a time; do not rely on the batch",
        "      or grid size. Batches are random: if `run` needs others, such as positive",
        "      ones, return them from `example_inputs`",
        "    to repeat the check 'vmap' alone: check_kernel(kernel, ...,",
        "      configs=[{'rows': 1}], without=['second derivative', 'tangents', 'inputs',",
        "      'dtypes', 'platforms', 'key', 'pickle', 'export', 'split'])",
    ]


def made(check, status, rows=1, reason="", **options):
    return CheckRow(check=check, config={"rows": rows}, status=status, reason=reason, **options)


def flat(rows, count=2):
    report = CheckReport("sine@v0", tuple({"rows": n} for n in range(1, count + 1)), tuple(rows))
    return " ".join(str(report).split())


def test_advice_is_about_the_first_failure_of_each_configuration_and_names_what_follows():
    rows = [made("outputs", "ok", 1), made("outputs", "failed", 2, "off", error=0.5, allowed=0.1)]
    rows += [made("vmap", "failed", 2, "off"), made("odd sizes", "failed", 2, "off"), made("pickle", "failed", 2, "no")]
    text = flat(rows)
    assert "outputs: rows=2 is wrong, the others are not: look at what depends on the configuration" in text
    assert "the other failures follow from it: vmap, odd sizes to repeat the check 'outputs' alone" in text
    assert "pickle: define the kernel at the top of a module" in text
    assert "mask the rest" not in text
    assert "under vmap" not in text
    assert "vmap: under vmap `run` sees one example" in flat(
        [made("outputs", "ok", 2), made("vmap", "failed", 2, "off")]
    )


def test_advice_on_an_exception_repeats_it():
    rows = [made("types", "failed", 2, "RuntimeError: tile does not fit", raised=True)]
    rows += [made("bfloat16", "ok", 1, error=0.004, allowed=0.02), made("bfloat16", "failed", 2, "tile", raised=True)]
    text = flat(rows)
    assert "types: rows=2 raises RuntimeError: tile does not fit: fix it, or leave it out of config_space" in text
    assert "sum in float32" not in text
    assert "same shapes" not in text
    assert "bfloat16 failed - - 1 of 2" in text  # the error of the failed run, which has none
    assert "fix it; untuned calls run with the heuristic's" in flat([made("types", "failed", 1, "x", raised=True)])


def test_checks_that_were_not_run_after_a_failure_are_listed():
    report = check_kernel(wrong_kernels.RaisingConfiguration(), x, w, strict=False, without=only("gradient", "inputs"))
    left = [row.check for row in report.rows if row.reason.startswith("not run: types already failed")]
    assert left[:4] == ["outputs", "repeated", "arguments", "jit"]
    assert "scaled inputs, zeros" in left
    assert "not run: types already failed: outputs, repeated, arguments, jit" in " ".join(str(report).split())


def test_after_a_wrong_gradient_the_rows_that_follow_are_skipped():
    groups = only("gradient", "second derivative", "inputs")
    report = check_kernel(wrong_kernels.GradientOfOneArgument(), x, w, strict=False, without=groups)
    skipped = {row.check: row.reason for row in report.rows if row.status == "skipped"}
    assert skipped["second derivative"] == "not run: the gradient already failed"
    assert skipped["odd sizes"] == "not run: gradient of w already failed"


def test_a_heuristic_that_does_not_run_skips_all_other_checks():
    report = check_kernel(wrong_kernels.Leaking(), x, w, strict=False, without=GROUPS)
    assert (report.rows[-1].check, report.rows[-1].status) == ("all other checks", "skipped")


def test_the_stack_of_a_crash_names_the_configuration(tmp_path):
    import faulthandler

    with open(tmp_path / "stack", "w") as file:
        named_after({"rows": 64}, lambda: faulthandler.dump_traceback(file))()
    assert 'File "check_kernel", line 2 in configuration rows=64' in (tmp_path / "stack").read_text()


def test_a_long_name_has_its_own_line():
    name = "gradient of state['optimizer']['second_moment']"
    text = str(CheckReport("adam@v0", (1,), (CheckRow(check=name, config=1, status="ok", error=0.5, allowed=1.0),)))
    assert text.splitlines()[2:] == [name, "       ok      0.5          1        1"]


def test_an_invalid_kernel_or_group_is_an_error():
    with pytest.raises(
        ArgumentError, match=r"kernel must be a Kernel or a function under tune; .*pass its kernel.* got"
    ):
        check_kernel(jnp.sin, x)
    with pytest.raises(ArgumentError, match=r"unavailable must name groups of checks.*got 'speed'"):
        check_kernel(wrong_kernels.right_sine, x, unavailable={"speed": "slow"})
    with pytest.raises(ArgumentError, match=r"without must name groups of checks.*got 'speed'"):
        check_kernel(wrong_kernels.right_sine, x, without=["speed"])


class Halves(sample_kernels.WithRule):
    """`cfg` changes the call's program, but not that of its gradient rule."""

    def run(self, x, w, *, cfg):
        return jnp.concatenate([sample_kernels.tanh_matmul(part, w) for part in jnp.split(x, cfg)])

    def heuristic_cfg(self, inv):
        return 1

    def config_space(self, inv):
        return [1, 2]


class Idle(Halves):
    """`cfg` changes nothing."""

    def run(self, x, w, *, cfg):
        return sample_kernels.tanh_matmul(x, w)


@pytest.mark.parametrize(
    ("kernel", "configs", "said"),
    [
        (Halves("halves"), None, ["check the use of cfg in the gradient rule"]),
        (Idle("idle"), None, ["check the use of cfg in run and the gradient rule"]),
        (Idle("idle"), [1], []),
        (sample_kernels.Plain("plain"), None, []),
    ],
)
def test_configurations_that_lower_to_one_program_are_called_so(kernel, configs, said):
    report = check_kernel(kernel, x, w, configs=configs, without=only("gradient"))
    rows = [row for row in report.rows if row.check == "configurations differ"]
    assert [row.reason.partition("; ")[2] for row in rows] == said
