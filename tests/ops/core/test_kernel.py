# SPDX-License-Identifier: Apache-2.0
"""Kernels: names, hooks and their defaults, and which form of a hook serves which platform."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.ops.sample_kernels import Times

from ejkernel import ops
from ejkernel.ops import Kernel
from ejkernel.ops.core import hooks
from ejkernel.ops.errors import KernelError, KernelWarning, NoConfigError, UnsupportedError

X = np.arange(8, dtype=np.float32)


@dataclasses.dataclass(frozen=True)
class Placed:
    platform: str = "auto"


def lowered_for(executor, kernel, platform, **options):
    return jax.jit(lambda x: executor(kernel, x, **options)).trace(X).lower(lowering_platforms=(platform,)).as_text()


# --- which form of run ---

FORMS = ["mosaic_gpu", "triton", "gpu", "cuda", "pallas", "tpu", "cpu", "xla"]


def kernel_with(*forms, plain=False):
    """Return a kernel with the given forms; a constant in its program shows the form: 100 + its index; 100 is plain."""

    def form(number):
        return lambda self, x, *, cfg: x + number

    hooks = {f"run_{name}": form(101 + FORMS.index(name)) for name in forms}
    if plain:
        hooks["run"] = form(100)
    return type("Forms", (Kernel,), {**hooks, "heuristic_cfg": lambda self, inv: Placed()})()


def forms_in(text):
    """Return the names of the forms that a program was made of."""
    numbers = {round(float(number)) - 100 for number in re.findall(r"dense<(1\.\d+e\+02)>", text)}
    return [["plain", *FORMS][number] for number in sorted(numbers)]


@pytest.mark.parametrize(
    ("platform", "forms", "expected"),
    [
        ("cuda", ["mosaic_gpu", "triton", "gpu", "xla"], "mosaic_gpu"),
        ("cuda", ["triton", "gpu", "cuda", "xla"], "triton"),
        ("cuda", ["gpu", "cuda", "xla"], "gpu"),
        ("cuda", ["cuda", "xla"], "cuda"),
        ("cuda", ["xla", "cpu", "pallas"], "xla"),
        ("cuda", ["pallas", "tpu", "cpu"], "plain"),
        ("tpu", ["pallas", "tpu", "xla"], "pallas"),
        ("tpu", ["tpu", "xla", "triton"], "tpu"),
        ("tpu", ["xla", "triton"], "xla"),
        ("cpu", ["cpu", "xla", "triton"], "cpu"),
        ("cpu", ["xla", "triton", "pallas"], "xla"),
        ("cpu", ["triton", "pallas"], "plain"),
    ],
)
def test_the_first_form_of_the_platform_runs(executor, platform, forms, expected):
    assert forms_in(lowered_for(executor, kernel_with(*forms, plain=True), platform)) == [expected]


@pytest.mark.parametrize(("has_mosaic", "expected"), [(True, "mosaic_gpu"), (False, "triton")])
def test_mosaic_gpu_runs_where_the_chip_has_it(executor, monkeypatch, has_mosaic, expected):
    monkeypatch.setattr(hooks, "has_mosaic_gpu", lambda: has_mosaic)
    assert forms_in(lowered_for(executor, kernel_with("mosaic_gpu", "triton"), "cuda")) == [expected]


@pytest.mark.parametrize(("asked", "expected"), [("cpu", "cpu"), ("xla", "xla"), ("auto", "cpu")])
def test_a_configuration_may_name_the_form(executor, asked, expected):
    kernel = kernel_with("cpu", "xla", plain=True)
    assert forms_in(lowered_for(executor, kernel, "cpu", cfg=Placed(asked))) == [expected]


@pytest.mark.parametrize("plain", [True, False])
def test_a_configuration_may_name_a_form_of_another_platform_that_the_program_is_for(executor, plain):
    kernel = kernel_with("cpu", "triton", "tpu", plain=plain)
    for platform, asked in (("cuda", "triton"), ("tpu", "tpu")):
        assert forms_in(lowered_for(executor, kernel, platform, cfg=Placed(asked))) == [asked]


@pytest.mark.parametrize("hook", ["heuristic_cfg_tpu", "config_space_tpu"])
def test_a_kernel_with_configurations_for_one_platform_is_lowered_for_it_only(executor, hook):
    def found(self, inv):
        return Placed() if hook.startswith("heuristic") else [Placed()]

    kernel = type("There", (Kernel,), {"run": lambda self, x, *, cfg: x + 1.0, hook: found})()
    lowered_for(executor, kernel, "tpu")
    with pytest.raises(NoConfigError):
        executor(kernel, X)


@pytest.mark.parametrize(("forms", "expected"), [(["mosaic_gpu", "triton"], "triton"), (["cuda", "xla"], "xla")])
def test_forms_for_nvidia_gpus_are_not_lowered_for_amd(executor, forms, expected):
    assert forms_in(lowered_for(executor, kernel_with(*forms), "rocm")) == [expected]


def test_without_jit_the_hooks_of_the_arrays_platform_run(executor, monkeypatch):
    # As on a GPU machine, where these arrays are in the CPU's memory.
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with jax.disable_jit():
        there = executor(kernel_with("cpu", "triton"), jax.device_put(X, jax.devices("cpu")[0]))
    np.testing.assert_array_equal(there, X + 101 + FORMS.index("cpu"))


def test_differentiation_inside_a_kernel_uses_the_programs_platform(executor):
    class Prints(Kernel[Placed, jax.Array]):
        def run_cpu(self, x, *, cfg):
            jax.debug.print("{}", x[0])  # so that it is differentiated as if it were no call
            return 2.5 * x

        def run_tpu(self, x, *, cfg):
            return 3.5 * x

        def heuristic_cfg(self, inv):
            return Placed()

    class Slope(Prints):
        run_cpu = run_tpu = lambda self, x, *, cfg: jax.grad(lambda x: executor(prints, x).sum())(x)

    prints = Prints("prints")
    text = lowered_for(executor, Slope("slope"), "tpu")
    assert "3.5" in text
    assert "2.5" not in text


def test_a_missing_form_is_replaced_by_the_plain_one(executor):
    assert forms_in(lowered_for(executor, kernel_with("cpu", plain=True), "cpu", cfg=Placed("xla"))) == ["plain"]


@pytest.mark.parametrize("asked", ["triton", "pallas", "mosaic_gpu", "cuda"])
def test_a_form_that_the_device_does_not_have_is_an_error(executor, asked):
    kernel = kernel_with("triton", "pallas", "mosaic_gpu", "cpu", plain=True)
    with pytest.raises(UnsupportedError, match=f"cfg.platform='{asked}' does not run on 'cpu'; use one of cpu, xla"):
        executor(kernel, X, cfg=Placed(asked))


def test_a_form_that_nothing_can_serve_is_an_error(executor):
    with pytest.raises(UnsupportedError, match=r"cfg.platform='xla', but Forms has no run_xla and no run"):
        executor(kernel_with("cpu"), X, cfg=Placed("xla"))


def test_a_kernel_without_run_is_an_error(executor):
    with pytest.raises(KernelError, match=r"Forms has no run; define run\(self, ..., \*, cfg\) or run_<platform>"):
        executor(kernel_with(), X)


def test_a_kernel_for_other_platforms_is_an_error_that_names_its_forms(executor):
    with pytest.raises(UnsupportedError, match="Forms does not run on 'cpu': it has run_triton and no plain run"):
        executor(kernel_with("triton"), X)


def test_a_kernel_for_another_platform_can_be_lowered_for_it(executor):
    assert forms_in(lowered_for(executor, kernel_with("triton"), "cuda")) == ["triton"]


def test_a_program_for_two_platforms_has_the_form_of_each(executor):
    kernel = kernel_with("triton", "cpu")
    traced = jax.jit(lambda x: executor(kernel, x)).trace(X)
    text = traced.lower(lowering_platforms=("cpu", "cuda")).as_text()
    assert forms_in(text) == ["triton", "cpu"]


def test_other_hooks_have_platform_forms_too(executor):
    class AutotuneData(Times):
        def heuristic_cfg_cpu(self, inv):
            return 7

    assert executor(AutotuneData(), X)[1] == 7


# --- names ---


@pytest.mark.parametrize("name", ["", "a b", "matmul@v1", "1st", "a#b", "a:b", "größe"])
def test_a_name_that_would_break_labels_is_an_error(name):
    with pytest.raises(KernelError, match=r"name must be ASCII letters, digits, '_', '-' or '.', got"):
        Times(name=name)


def test_a_class_name_or_version_that_would_break_labels_is_an_error():
    with pytest.raises(KernelError, match=r"name must be ASCII letters, .* got 'Größe'"):
        type("Größe", (Times,), {})()
    with pytest.raises(KernelError, match=r"Newer.version must be ASCII letters, digits, '_' or '.', got '1-beta'"):
        type("Newer", (Times,), {"version": "1-beta"})


def test_an_executor_takes_a_kernel_without_a_name(executor):
    class Nameless(Times):
        def __init__(self):
            pass

    assert (Nameless().op_id, int(executor(Nameless(), X)[1])) == ("Nameless", 1)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("config_spaces", "config_space"),
        ("heuristic_cgf", "heuristic_cfg"),
        ("heuristic_config", "heuristic_cfg"),
        ("candidate_configs", "candidate_cfgs"),
        ("space", "config_space"),
        ("heuristic", "heuristic_cfg"),
        ("fwd_residual", ""),
    ],
)
def test_a_method_with_almost_the_name_of_a_hook_is_named(name, meant):
    hooks = {name: lambda self, inv: [1], "run": lambda self, x, *, cfg: x, "run_gpu": lambda self, x, *, cfg: x}
    with (
        contextlib.nullcontext()
        if not meant
        else pytest.warns(KernelWarning, match=f"Near.{name} is no hook and is never called; did you mean '{meant}'")
    ):
        type("Near", (Kernel,), hooks)


def test_a_method_that_a_hook_may_call_is_not_called_a_misspelt_hook():
    own = {"space": lambda self: [1], "candidate_cfgs_cpu": lambda self, inv: self.space()}
    type("Own", (Kernel,), own | {"run": lambda self, x, *, cfg: x})


# --- configurations ---


def test_without_any_configuration_a_call_is_an_error(executor):
    class Bare(Kernel[int, jax.Array]):
        def run(self, x, *, cfg):
            return x

    with pytest.raises(NoConfigError, match="No configuration for 'Bare'"):
        executor(Bare(), X)


def test_a_kernel_without_a_heuristic_runs_with_known_configurations(executor, chain):
    class Bare(Kernel[int, jax.Array]):
        def run(self, x, *, cfg):
            return cfg * x

    kernel = Bare()
    chain.cache.put(ops.Invocation(kernel=kernel, args=(X,)).key, 5)
    assert executor(kernel, X)[1] == 5


def test_an_empty_config_space_and_no_heuristic_is_an_error(executor):
    class Empty(Times):
        heuristic_cfg = Kernel.heuristic_cfg

        def config_space(self, inv):
            return []

    with pytest.raises(NoConfigError):
        executor(Empty(), X)


def test_candidates_may_be_declared_under_their_other_name(executor):
    class Candidates(Times):
        heuristic_cfg = Kernel.heuristic_cfg

        def candidate_cfgs(self, inv):
            return [4, 5]

    assert executor(Candidates(), X)[1] == 4


def test_both_names_of_the_candidates_give_them():
    kernel, inv = Times(), ops.Invocation(kernel=Times(), args=(X,))
    assert kernel.candidate_cfgs(inv) == kernel.config_space(inv) == [1]


# --- missing hooks ---


@pytest.mark.parametrize(
    ("name", "arguments"), [("custom_vjp", ((), None, {}, ())), ("fwd_with_residuals", ()), ("vjp", ((), None, ()))]
)
def test_a_missing_gradient_rule_is_a_clear_error(name, arguments):
    options = {} if name == "custom_vjp" else {"cfg": 1}
    with pytest.raises(KernelError, match=f"Times has no {name}"):
        getattr(Times(), name)(*arguments, **options)


def test_a_missing_reference_is_a_clear_error():
    with pytest.raises(KernelError, match="Times has no reference"):
        Times().reference(X)


def test_a_missing_run_is_a_clear_error():
    with pytest.raises(KernelError, match="Forms has no run"):
        kernel_with().run(X, cfg=1)


class Saves(Kernel[int, jax.Array]):
    """Twice its argument; `form` changes the output beside the residuals."""

    form = staticmethod(lambda out: out)

    def run(self, x, *, cfg):
        return x * 2

    def heuristic_cfg(self, inv):
        return 1

    def fwd_with_residuals(self, x, *, cfg):
        return self.form(x * 2), x

    def vjp(self, residuals, out, cotangents, x, *, cfg):
        return (2 * cotangents[0].astype(x.dtype),)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Checked:
    """Outputs of a class that reads the shape of its field."""

    out: object

    def __post_init__(self):
        assert self.out.ndim < 3


@pytest.mark.parametrize(
    ("form", "given"),
    [
        (lambda out: out.astype(jnp.bfloat16), r"bfloat16\[4\]"),
        (lambda out: out[:2], r"float32\[2\]"),
        (lambda out: (out,), r"\(float32\[4\],\)"),
        (lambda out: (out, out), r"\(float32\[4\], float32\[4\]\)"),
        (Checked, r"CustomNode\(Checked\[\(\)\], \[float32\[4\]\]\)"),
    ],
)
@pytest.mark.parametrize("transform", [jax.grad, lambda f: jax.vmap(jax.grad(f))])
def test_outputs_with_and_without_residuals_have_the_same_types(form, given, transform):
    kernel = type("Other", (Saves,), {"form": staticmethod(form)})("other")
    x = jnp.ones(4) if transform is jax.grad else jnp.ones((3, 4))
    with pytest.raises(KernelError, match=rf"^other: the forward with residuals returns {given}, without them float32"):
        transform(lambda x: jnp.sum(jnp.asarray(kernel(x))))(x)
    np.testing.assert_array_equal(jax.grad(lambda x: Saves("saves")(x).sum())(jnp.ones(4)), 2 * jnp.ones(4))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class WithFunction:
    """Outputs with a static value that is new in each trace."""

    out: object
    function: object = dataclasses.field(metadata={"static": True})


def test_outputs_of_a_kernel_that_keeps_residuals_may_have_new_static_values():
    kernel = ops.tune(
        lambda x, *, rows=1: WithFunction(jnp.sin(x), lambda y: y),
        space={"rows": [1]},
        name="new_static_values",
        keeps_residuals=True,
    )
    np.testing.assert_allclose(jax.grad(lambda x: kernel(x).out.sum())(jnp.ones(3)), np.cos(np.ones(3)), 1e-6)


@pytest.mark.parametrize(("there", "missing"), [("fwd_with_residuals", "vjp"), ("vjp", "fwd_with_residuals")])
def test_half_a_residual_form_is_an_error(executor, there, missing):
    kernel = type("Half", (Times,), {there: lambda self, *args, cfg: None})()
    with pytest.raises(KernelError, match=f"Half has {there} but no {missing}; define both, or custom_vjp"):
        jax.grad(lambda x: executor(kernel, x).sum())(X)


def test_an_invalid_result_of_prepare_is_a_clear_error(executor):
    kernel = type("Unprepared", (Times,), {"prepare": lambda self, x: x})()
    with pytest.raises(KernelError, match=r"Unprepared: prepare must return \(args, kwargs\), got"):
        executor(kernel, X)


class Meeting(Times):
    """Two threads trace it for the first time at once: the second begins before the first ends, and ends after it."""

    def run(self, x, *, cfg):
        if threading.current_thread().name == "first":
            self.first_is_here.set()
            assert self.second_is_here.wait(60)
        else:
            self.second_is_here.set()
            assert self.first_is_done.wait(60)
        return x * cfg


def test_threads_that_trace_equal_calls_at_once_do_not_take_each_other_s_for_done(executor):
    kernel = Meeting()
    kernel.first_is_here, kernel.second_is_here, kernel.first_is_done = (threading.Event() for _ in range(3))
    found = {}

    def trace():
        found[threading.current_thread().name] = jax.eval_shape(lambda x: executor(kernel, x), X).shape
        kernel.first_is_done.set()

    threads = [threading.Thread(target=trace, name=name) for name in ("first", "second")]
    threads[0].start()
    assert kernel.first_is_here.wait(60)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(("first", "second"), X.shape)


# --- types of configurations ---


@pytest.mark.parametrize(("base", "expected"), [(Kernel[Placed, jax.Array], Placed), (Times, int), (Kernel, None)])
def test_the_configuration_type_comes_from_the_class(base, expected):
    assert types.new_class("Some", (base,))().config_type is expected


def test_only_classes_are_configuration_types():
    assert types.new_class("Some", (Kernel[int | None, jax.Array],))().config_type is None


def test_a_class_may_set_its_configuration_type_itself():
    class Chosen(Kernel[Placed, jax.Array]):
        config_type = dict

    class Derived(Chosen):
        pass

    assert Derived().config_type is Chosen().config_type is dict


def test_a_kernel_shows_its_name_and_version():
    assert repr(Times()) == "Times('Times@v0')"
