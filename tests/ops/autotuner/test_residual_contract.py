# SPDX-License-Identifier: Apache-2.0
"""Residuals mean the same under every configuration, and tuning saves no pair of configurations that disagree."""

from __future__ import annotations

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.ops.autotuner.made_up_times import interleaved_with
from tests.ops.sample_kernels import told_apart

from ejkernel.ops import GradientWarning, Invocation, Kernel, TuningWarning, autotune, default_executor
from ejkernel.ops.autotuner.bench import timing
from ejkernel.ops.autotuner.bench.residuals import CONTRACT, partner_call
from ejkernel.ops.autotuner.tuner import Autotuner
from ejkernel.ops.config.policy import AutotunePolicy

X = np.linspace(0.1, 1.0, 6, dtype=np.float32)


class Sine(Kernel[int, jax.Array]):
    """`sin(x)`, which keeps the contract; configuration 1 is the heuristic, and 2 is faster."""

    def run(self, x, *, cfg):
        return told_apart(jnp.sin(x), cfg)

    def reference(self, x):
        return jnp.sin(x)

    def heuristic_cfg(self, inv):
        return 1

    def config_space(self, inv):
        return [1, 2]

    def fwd_with_residuals(self, x, *, cfg):
        return self.run(x, cfg=cfg), jnp.cos(x)

    def vjp(self, residuals, out, cotangents, x, *, cfg):
        return (told_apart(cotangents[0] * residuals, cfg),)


class Scaled(Sine):
    """Right under each configuration alone, and wrong where forward and backward have different ones."""

    def fwd_with_residuals(self, x, *, cfg):
        return self.run(x, cfg=cfg), jnp.cos(x) * cfg

    def vjp(self, residuals, out, cotangents, x, *, cfg):
        return (told_apart(cotangents[0] * residuals / cfg, cfg),)


class Padded(Sine):
    """The shape of its residual depends on the configuration."""

    def fwd_with_residuals(self, x, *, cfg):
        return self.run(x, cfg=cfg), jnp.tile(jnp.cos(x), cfg)

    def vjp(self, residuals, out, cotangents, x, *, cfg):
        return (told_apart(cotangents[0] * residuals[: x.size], cfg),)


class Wider(Sine):
    """The dtype of its residual depends on the configuration."""

    def fwd_with_residuals(self, x, *, cfg):
        return self.run(x, cfg=cfg), jnp.cos(x).astype(jnp.float16 if cfg == 2 else jnp.float32)


class Flagged(Sine):
    """Its backward reads an integer residual that depends on the configuration."""

    def fwd_with_residuals(self, x, *, cfg):
        return self.run(x, cfg=cfg), (jnp.cos(x) / jnp.float32(2), jnp.int32(cfg))

    def vjp(self, residuals, out, cotangents, x, *, cfg):
        half, by = residuals
        return (told_apart(cotangents[0] * half * 2 * by / cfg, cfg),)


class Kept(Sine):
    """The `jax.custom_vjp` inside `run` saves a value that depends on the configuration."""

    keeps_residuals = True
    fwd_with_residuals, vjp = Kernel.fwd_with_residuals, Kernel.vjp

    def run(self, x, *, cfg):
        @jax.custom_vjp
        def sine(x):
            return told_apart(jnp.sin(x), cfg)

        sine.defvjp(lambda x: (sine(x), jnp.cos(x) * cfg), lambda saved, ct: (ct * saved / cfg,))
        return sine(x)


BREAKING = {kernel.op_id: kernel for kernel in (Scaled(), Padded(), Wider(), Flagged(), Kept())}


@pytest.fixture(autouse=True)
def faster(monkeypatch):
    """Configuration 2 takes half the time of any other."""
    monkeypatch.setattr(timing, "interleaved", interleaved_with(lambda config: 1.0 if config == 2 else 2.0))


def total(kernel):
    return lambda x: kernel(x).sum()


def configs(result):
    return {entry.op_id_v.partition("@")[0]: entry.cfg for entry in result.entries}


@contextlib.contextmanager
def reported(text):
    """Expect a `GradientWarning` with `text` among the warnings of the block."""
    with pytest.warns(TuningWarning) as caught:
        yield
    found = [str(warning.message) for warning in caught if warning.category is GradientWarning]
    assert any(re.search(text, one) for one in found), found


def forward_and_backward(kernel, x=X):
    """Return the invocations of a kernel's call and of its gradient."""
    forward = Invocation(kernel=kernel, args=(x,))
    return forward, partner_call(forward)


def tune(inv, **options):
    return Autotuner().tune(inv, inv.kernel, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", BREAKING)
def test_a_forward_with_residuals_by_configuration_is_not_used(name):
    kernel = BREAKING[name]
    with reported(re.escape(CONTRACT)):
        result = autotune(jax.grad(total(kernel)), X)
    assert {name: 1, f"{name}.bwd": 1} == configs(result) | {f"{name}.bwd": 1}
    with result:
        np.testing.assert_allclose(jax.jit(jax.grad(total(kernel)))(X), np.cos(X), rtol=1e-3)


@pytest.mark.slow
def test_a_pair_that_agrees_is_tuned_in_both_directions():
    kernel = Sine()
    result = autotune(jax.grad(total(kernel)), X)
    assert configs(result) == {"Sine": 2, "Sine.bwd": 2}
    assert result.searches[0].checked == ("outputs", "gradients")


@pytest.mark.slow
def test_under_vmap_the_pair_is_checked_as_well():
    kernel = Scaled()
    with reported("residual 0 differs from the heuristic's"):
        result = autotune(jax.grad(lambda x: jax.vmap(kernel)(x).sum()), np.stack([X, X]))
    assert configs(result) == {"Scaled": 1, "Scaled.bwd": 1}


@pytest.mark.slow
def test_the_backward_call_of_a_forward_has_the_key_that_the_program_gives_it():
    kernel = Sine()
    keys = {entry.op_id_v: entry.call_key for entry in autotune(jax.grad(total(kernel)), X).entries}
    forward, backward = forward_and_backward(kernel)
    assert keys == {"Sine@v0": forward.call_key, "Sine.bwd@v0": backward.call_key}


def test_a_forward_is_not_saved_beside_a_wrong_backward():
    class Misread(Sine):
        """Its backward configuration 3 is wrong."""

        def vjp(self, residuals, out, cotangents, x, *, cfg):
            return (told_apart(cotangents[0] * residuals * (2 if cfg == 3 else 1), cfg),)

    forward, backward = forward_and_backward(Misread())
    chain = default_executor().chooser
    chain.remember(backward.key, 3)
    with reported("backward configuration 3, which runs with it, is wrong with any residuals"):
        data = chain.search(forward, forward.kernel)
    assert (data.config, data.outcomes[1].status) == (1, "wrong")


@pytest.mark.slow
@pytest.mark.parametrize("tuned", [0, 1], ids=["forward", "backward"])
def test_a_saved_configuration_that_does_not_run_is_no_partner(tuned):
    class Removed(Sine):
        """It no longer has configuration 3."""

        def fwd_with_residuals(self, x, *, cfg):
            return self.run(x, cfg={1: 1, 2: 2}[cfg]), jnp.cos(x)

        def vjp(self, residuals, out, cotangents, x, *, cfg):
            return (told_apart(cotangents[0] * residuals, {1: 1, 2: 2}[cfg]),)

        def run(self, x, *, cfg):
            return super().run(x, cfg={1: 1, 2: 2}[cfg])

    calls = forward_and_backward(Removed())
    chain = default_executor().chooser
    chain.persistent.put(calls[1 - tuned].key, 3)
    assert chain.search(calls[tuned], calls[0].kernel).config == 2  # a warning would be an error


def test_a_kept_backward_that_disagrees_with_an_earlier_forward_is_reported():
    kernel = Scaled()
    forward, backward = forward_and_backward(kernel)
    chain = default_executor().chooser
    chain.remember(forward.key, 2)
    with reported(
        "the heuristic, 1, stays, and its gradients are wrong: .* forward configuration 2, which runs with it"
    ):
        data = chain.search(backward, kernel)
    assert data.config == 1
    assert "forward configuration 2" in data.rule_fault


def test_a_backward_is_checked_with_the_forward_in_force():
    class Careless(Scaled):
        """Its backward is right with residuals of configuration 1 alone."""

        def vjp(self, residuals, out, cotangents, x, *, cfg):
            return (told_apart(cotangents[0] * residuals, cfg),)

    _, backward = forward_and_backward(Careless())
    with reported("residuals must have the same"):
        data = tune(backward, partners=[2])
    assert (data.config, data.outcomes[1].status) == (1, "wrong")
    assert "forward configuration 2" in data.outcomes[1].reason


def test_residual_types_are_compared_where_nothing_is_validated():
    forward, _ = forward_and_backward(Padded())
    with reported(r"its residuals are float32\[12\], the heuristic's float32\[6\]"):
        data = tune(forward, policy=AutotunePolicy(validate=False))
    assert data.config == 1


def test_without_residuals_no_pair_is_checked():
    class Plain(Sine):
        fwd_with_residuals, vjp = Kernel.fwd_with_residuals, Kernel.vjp

    assert partner_call(Invocation(kernel=Plain(), args=(X,))) is None


class Broken(Sine):
    """Its heuristic does not run."""

    def run(self, x, *, cfg):
        return super().run(x.reshape(-1, 6 if cfg == 2 else 4).ravel(), cfg=cfg)


def test_if_the_heuristic_does_not_run_another_configuration_wins():
    assert autotune(Broken("broken"), X) == 2
