# SPDX-License-Identifier: Apache-2.0
"""Calls found in a program's text, and tuned from it."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest
from tests.ops.sample_kernels import Applies, WithResiduals

from ejkernel import ops
from ejkernel.ops import ConfigSelectorChain, OfflineWarning, autotune_lowered, label, recording
from ejkernel.ops.execution.discovery import calls_in_text

X, W = jnp.ones((4, 4)), jnp.ones((4, 4))
KERNEL = WithResiduals("in_texts")


WITH_FUNCTION = Applies("with_function")


@pytest.fixture
def stamped(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", "json")


def gradient_of(kernel):
    return jax.jit(jax.grad(lambda x, w: kernel(x, w).sum(), (0, 1)))


@pytest.mark.parametrize("dialect", ["stablehlo", "hlo"])
def test_calls_are_found_in_either_text(stamped, dialect):
    with recording() as seen:
        lowered = gradient_of(KERNEL).lower(X, W)
    program = calls_in_text(lowered.as_text(dialect=dialect))
    assert [inv.key for inv in program.calls] == [inv.key for inv in seen]
    assert (program.labels, program.bare, program.refused) == (2, (), {})


@pytest.mark.slow
def test_a_text_is_tuned_without_a_recording(stamped):
    text = gradient_of(KERNEL).lower(X, W).as_text()
    ops.registry.clear_invocations()
    result = autotune_lowered(ConfigSelectorChain(), text)
    assert [entry.op_id_v for entry in result.entries] == ["in_texts@v0", "in_texts.bwd@v0"]


def test_a_call_is_tuned_with_its_own_precision(stamped):
    """It does not use the settings of the tuning process."""
    seen = []

    class Watched(WithResiduals):
        def run(self, x, w, *, cfg):
            seen.append((ops.Invocation(op_id="any").precision, x.dtype))
            return super().run(x, w, cfg=cfg)

    kernel = Watched("watched")
    with jax.default_matmul_precision("highest"), jax.enable_x64(True):
        text = jax.jit(kernel).lower(*[jax.ShapeDtypeStruct((4, 4), "float64")] * 2).as_text()
    seen.clear()
    result = autotune_lowered(ConfigSelectorChain(), text)
    assert len(result) == 1
    assert {(precision, str(dtype)) for precision, dtype in seen} == {("highest", "float64")}


def test_labels_without_descriptions_are_counted_apart(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", "hash")
    program = calls_in_text(gradient_of(KERNEL).lower(X, W).as_text())
    assert (len(program.calls), len(program.bare), program.labels) == (0, 2, 2)


def test_calls_that_cannot_be_rebuilt_are_one_warning_per_reason(stamped):
    text = jax.jit(lambda x: WITH_FUNCTION(x, functools.partial(jax.nn.gelu, approximate=False))).lower(X).as_text()
    texts = [text.replace("with_function@v0", name) for name in ("absent@v0", "absent.two@v0", "with_function@v9")]
    program = calls_in_text("\n".join([text, *texts]))
    assert [inv.op_id for inv in program.calls] == ["with_function"]
    assert len(program.why_refused()) == 3
    with pytest.warns(OfflineWarning, match=r"cannot be rebuilt: .* there is no kernel") as caught:
        autotune_lowered(ConfigSelectorChain(), "\n".join(texts))
    assert len(caught) == 3


def test_an_unregistered_function_is_refused(stamped):
    text = jax.jit(lambda x: WITH_FUNCTION(x, jnp.tanh)).lower(X).as_text().replace("jax.numpy.tanh", "os.path.join")
    (reason,) = calls_in_text(text).why_refused()
    assert "'os.path.join' may not be named here" in reason


def test_a_payload_under_another_calls_label_is_refused(stamped):
    text = jax.jit(KERNEL).lower(X, W).as_text()
    (inv,) = calls_in_text(text).calls
    (reason,) = calls_in_text(text.replace(inv.call_key, "0" * 16)).why_refused()
    assert "has another key" in reason


def test_hostile_texts_are_read_without_a_call(stamped):
    label_text = label("in_texts@v0", "0" * 16)
    payloads = ["{\\22op\\22:\\22in_texts@v0\\22}", "{", "[]", "{\\22__import__\\22:\\22os\\22}", "{" * 5000]
    text = "\n".join(f'"{label_text[:-1]}{n}" = "{payload}"' for n, payload in enumerate(payloads))
    program = calls_in_text(text)
    assert program.calls == ()
    assert program.labels == len(payloads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OfflineWarning)
        assert len(autotune_lowered(ConfigSelectorChain(), text)) == 0
