# SPDX-License-Identifier: Apache-2.0
"""Tuning reports a gradient that differs from the derivative of its kernel, for any winner."""

from __future__ import annotations

import json
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.ops import sample_kernels, wrong_kernels
from tests.ops.autotuner.made_up_times import interleaved_with
from tests.ops.sample_kernels import told_apart

from ejkernel.ops import GradientWarning, Invocation, TuningWarning, autotune, default_executor
from ejkernel.ops.autotuner.bench import timing
from ejkernel.ops.autotuner.tuner import Autotuner
from ejkernel.ops.config.policy import AutotunePolicy

_rng = np.random.default_rng(0)
x, w = (_rng.standard_normal(shape, np.float32) for shape in ((4, 5), (5, 3)))


def tune(kernel, *args, **options):
    return Autotuner().tune(Invocation(kernel=kernel, args=args or (x, w)), kernel, **options)


def backward(kernel):
    """Return a function of `x` and `w`; differentiating it calls the kernel's backward."""
    return jax.grad(lambda x, w: kernel(x, w).sum(), (0, 1))


class WrongWithReference(wrong_kernels.GradientOfOneArgument):
    def reference(self, x, w):
        return jnp.tanh(x @ w)


WRONG_ALIKE = {
    "of run": (wrong_kernels.GradientOfOneArgument(), r"JAX's derivatives of `run`: the gradient of w differs"),
    "of reference": (WrongWithReference(), r"JAX's derivatives of `reference`: the gradient of w differs"),
    "of a wide reference": (wrong_kernels.WideReference(), r"of `reference`: the gradient of w differs"),
    "of residuals": (wrong_kernels.GradientOfResiduals(), r"JAX's derivatives of `run`: the gradient of x differs"),
    "inside run": (wrong_kernels.WrongTangents(), r"JAX's derivatives of `reference`: the gradient of x differs"),
    "raising": (wrong_kernels.RaisingRule(), r"its gradient rule fails: .* must return a tuple of 2 gradients"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG_ALIKE)
def test_a_rule_wrong_under_every_configuration_is_reported(name):
    kernel, text = WRONG_ALIKE[name]
    with pytest.warns(GradientWarning, match=f"^{kernel.op_id}: .*{text}"):
        data = tune(kernel)
    assert data.rule_fault
    assert data.rule_fault in data.summary()
    assert json.loads(json.dumps(data.summary_data()))["rule_fault"] == data.rule_fault


def test_rules_are_not_checked_if_only_outputs_are_validated(monkeypatch):
    class Wrong(wrong_kernels.GradientOfOneArgument):
        def config_space(self, inv):
            return [1, 2]

    monkeypatch.setattr(timing, "interleaved", interleaved_with(lambda config: 1.0 if config == 2 else 2.0))
    data = tune(Wrong("wrong_but_fast"), policy=AutotunePolicy(validate="outputs"))
    assert data.rule_fault == ""
    assert data.checked == ("outputs",)


def test_the_warning_says_how_far_the_gradient_is_off():
    with pytest.warns(TuningWarning, match=r"\d instead of -?\d.*relative \(allowed: 0.002\)"):
        tune(wrong_kernels.GradientOfOneArgument())


def test_the_fault_is_saved_with_the_entry():
    with pytest.warns(GradientWarning):
        autotune(wrong_kernels.GradientOfOneArgument(), x, w)
    ((_, entry),) = default_executor().chooser.persistent.entries()
    assert "the gradient of w" in entry.measured["rule_fault"]


@pytest.mark.slow
@pytest.mark.parametrize("batched", [False, True], ids=["alone", "under vmap"])
@pytest.mark.parametrize("name", ["of run", "of residuals"])
def test_without_a_reference_a_backward_is_compared_with_run(name, batched):
    kernel, text = WRONG_ALIKE[name]
    function = backward(kernel)
    args = (np.stack([x, x + 1]), w) if batched else (x, w)
    with pytest.warns(GradientWarning) as caught:  # the forward's too, if it is called
        autotune(jax.vmap(function, (0, None)) if batched else function, *args)
    assert re.search(rf"{kernel.op_id}\.bwd: .*{text}", str(caught[-1].message))


def test_a_completely_wrong_backward_names_the_argument():
    with pytest.warns(TuningWarning, match=r"\.bwd: none of 1 candidate .* the gradient of w differs from the ref"):
        autotune(backward(WrongWithReference("alike")), x, w)


def test_a_backward_is_compared_with_a_reference_of_wider_results():
    found = autotune(backward(wrong_kernels.RightWithWideReference()), x, w)
    assert len(found) == 1  # without a TuningWarning


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "args"),
    [
        (sample_kernels.Plain(), (x, w)),
        (sample_kernels.WithRule(), (x, w)),
        (sample_kernels.WithResiduals(), (x, w)),
        (wrong_kernels.Referenced(), (x, w)),
        (wrong_kernels.Undifferentiable(), (x, w)),
        (wrong_kernels.UndifferentiableWithRule(), (x, w)),
        (wrong_kernels.Take(), (x, np.array([0, 2, 2, 1]), np.array([True, False, True, True]))),
    ],
    ids=lambda value: getattr(value, "op_id", ""),
)
def test_a_correct_kernel_is_not_reported(kernel, args):
    assert tune(kernel, *args).rule_fault == ""


def test_rules_are_not_checked_without_validation():
    data = tune(wrong_kernels.GradientOfOneArgument(), policy=AutotunePolicy(validate=False))
    assert data.rule_fault == ""


class Ranked(wrong_kernels.GradientOfOneArgument):
    """A kernel with a wrong gradient, and a different wrong gradient under configuration 2."""

    def run(self, x, w, *, cfg):
        return told_apart(jnp.tanh(x @ w), cfg)

    def reference(self, x, w):
        return jnp.tanh(x @ w)

    def config_space(self, inv):
        return [0, 1, 2]

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        dx, dw = super().custom_vjp(primals, cfg, kwargs, cotangents)
        return dx * (2 if cfg == 2 else 1), dw


@pytest.mark.slow
def test_a_kernel_with_such_a_rule_is_tuned_all_the_same(monkeypatch):
    monkeypatch.setattr(timing, "interleaved", interleaved_with({0: 3.0, 1: 2.0, 2: 1.0}.__getitem__))
    with pytest.warns(GradientWarning):
        data = tune(Ranked())
    assert [outcome.status for outcome in data.outcomes] == ["measured", "measured", "wrong"]
    assert (data.config, data.checked) == (1, ("outputs",))


def test_an_array_by_keyword_is_no_reason_to_leave_a_rule_unchecked():
    class Shifted(wrong_kernels.GradientOfOneArgument):
        def run(self, x, w, *, cfg, shift):
            return jnp.tanh(x @ w) + shift

    inv = Invocation(kernel=Shifted(), args=(x, w), kwargs={"shift": np.float32(1)})
    with pytest.warns(GradientWarning, match="the gradient of w differs"):
        Autotuner().tune(inv, inv.kernel)


def test_the_warning_may_be_silenced_separately():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradientWarning)
        assert tune(wrong_kernels.GradientOfOneArgument()).rule_fault
