# SPDX-License-Identifier: Apache-2.0
"""Messages about unknown arguments, values and commands name the right one."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from tests.arrays import ones

import ejkernel
from ejkernel.cli import main
from ejkernel.modules import (
    PagePool,
    flash_attention,
    grouped_matmul,
    grouped_matmul_wgrad,
    layer_norm,
    paged_plan,
    quantize,
    rms_norm,
)
from ejkernel.modules.flash_attention import FlashAttention, FlashAttentionConfig
from ejkernel.ops import (
    ArgumentError,
    CallError,
    EjkernelError,
    Kernel,
    NoConfigError,
    autotune,
    default_executor,
    tune,
)
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.utils.messages.names import did_you_mean, names_checked, nearest
from ejkernel.settings import Settings

X, W = jnp.ones((4, 8)), jnp.ones(8)
Q = ones((1, 4, 2, 8))
SIZES = jnp.array([4])


class Scaled(Kernel[int, object]):
    def run(self, x, w, *, cfg, rows=1):
        return x * w

    def heuristic_cfg(self, inv):
        return 1


class Prepared(Scaled):
    def prepare(self, x, w, *, rows=1):
        return (x, w), {}


@pytest.mark.parametrize("wrapped", [lambda f: f, jax.jit, jax.grad], ids=["eager", "jit", "grad"])
@pytest.mark.parametrize(("heads", "options"), [(3, {}), (2, {"implementation": "cudnn"})])
def test_the_traceback_of_an_error_is_short(wrapped, heads, options):
    key = jnp.ones((1, 4, heads, 8))
    step = wrapped(lambda q: flash_attention(q, key, key, **options).sum())
    with pytest.raises(EjkernelError) as raised:
        step(Q)
    inside = [frame.path for frame in raised.traceback if f"{Path(ejkernel.__file__).parent}" in str(frame.path)]
    assert not inside


def wrong_pool():
    return PagePool(pages=-1, page_size=4)


def wrong_plan():
    return paged_plan(jnp.array([0, 1]), jnp.array([1]), heads=3, kv_heads=2, page_size=4)


@pytest.mark.parametrize(
    "call",
    [
        wrong_pool,
        wrong_plan,
        lambda: quantize(X, block=-1),
        lambda: Scaled()(X, W, row=2),
        lambda: Scaled()(X, W, rows=object(), cfg="x", zzz=1),
        lambda: default_executor().explain(3),
        lambda: default_executor()(Scaled(), X, W, row=2),
        lambda: tune(space=[])(wrong_pool),
        lambda: tuned(X, rows="x"),
        lambda: autotune(3, X),
    ],
)
def test_the_traceback_of_an_error_ends_at_the_user_s_line(call):
    with pytest.raises(EjkernelError) as raised:
        call()
    assert raised.traceback[-1].path == Path(__file__)


def test_an_error_of_a_compiled_call_is_printed_once_with_the_line_of_the_call(monkeypatch, tmp_path):
    monkeypatch.setenv("EJKERNEL_ON_MISS", "error")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    with pytest.raises(NoConfigError) as raised:
        jax.jit(jax.grad(lambda x: rms_norm(x, W).sum()))(X)
    text = "".join(traceback.format_exception(raised.value))
    assert text.count("No configuration for 'rms_norm'") == 1
    lines = [frame.line for frame in traceback.extract_tb(raised.value.__cause__.__traceback__)]
    assert lines[-1] == "jax.jit(jax.grad(lambda x: rms_norm(x, W).sum()))(X)"


def test_an_error_in_an_inner_function_does_not_print_its_program(monkeypatch, tmp_path):
    monkeypatch.setenv("EJKERNEL_ON_MISS", "error")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    with pytest.raises(NoConfigError) as raised:
        jax.lax.scan(lambda x, _: (rms_norm(x, W), None), X, length=2)
    text = "".join(traceback.format_exception(raised.value))
    assert "KeyError" not in text
    assert "lambda ;" not in text


class RaisesTypeError(Scaled):
    def prepare(self, x, w):
        raise TypeError("its own")


@tune(space={"rows": [1, 2]})
def tuned(x, *, rows=1):
    return x


CALLS = [
    (lambda: flash_attention(Q, Q, Q, is_causal=True), "flash_attention has no argument `is_causal`; use `causal=`."),
    (lambda: flash_attention(Q, Q, Q, scale=1.0), "no argument `scale`; use `softmax_scale=`."),
    (lambda: flash_attention(Q, Q, Q, sm_scale=1.0), "no argument `sm_scale`; use `softmax_scale=`."),
    (lambda: flash_attention(Q, Q, Q, mask=None), "no argument `mask`; use `attention_mask=`."),
    (
        lambda: flash_attention(Q, Q, Q, attn_mask=None),
        "`attn_mask`: use `attention_mask=` for a boolean mask, `bias=",
    ),
    (lambda: flash_attention(Q, Q, Q, local_window_size=4), "`local_window_size`; use `sliding_window=`."),
    (lambda: flash_attention(Q, Q, Q, window_size=(-1, 0)), "use `sliding_window=`, with None instead of -1 for"),
    (lambda: flash_attention(Q, Q, Q, softcap=2.0), "`softcap`; use `logits_soft_cap=`."),
    (lambda: flash_attention(Q, Q, Q, key_value_seq_lengths=None), "use `key_lengths=`."),
    (lambda: flash_attention(Q, Q, Q, dropout_p=0.1), "use `dropout_rate=`."),
    (lambda: flash_attention(Q, Q, Q, enable_gqa=True), "heads are grouped whenever keys have fewer of them"),
    (
        lambda: flash_attention(Q, Q, Q, casual=True),
        "flash_attention has no argument `casual`; did you mean `causal=`?",
    ),
    (lambda: flash_attention(Q, Q, Q, zzz=True), "`zzz`; its arguments are query, key, value, causal, softmax_scale"),
    (
        lambda: flash_attention(Q, Q, Q, is_causal=True, scale=1.0),
        "no argument `is_causal`; use `causal=`. It has no argument `scale`; use `softmax_scale=`.",
    ),
    (
        lambda: flash_attention(Q, Q, Q, None),
        "flash_attention takes 3 arguments by position (query, key, value), got 4; pass the others by name: causal=, "
        "softmax_scale=, bias=, attention_mask=",
    ),
    (lambda: flash_attention(Q, Q), "flash_attention: missing a required argument: 'value'"),
    (
        lambda: FlashAttention()(Q, Q, Q, casual=True),
        "flash_attention has no argument `casual`; did you mean `causal=`",
    ),
    (lambda: rms_norm(X, W, epsilon=1e-6), "rms_norm has no argument `epsilon`; use `eps=`."),
    (lambda: rms_norm(X, scale=W), "use `weight=`."),
    (
        lambda: rms_norm(X, W, 1e-6),
        "rms_norm takes 2 arguments by position (x, weight), got 3; pass the others by name",
    ),
    (lambda: layer_norm(X, W, W, epsilon=1e-6), "layer_norm has no argument `epsilon`; use `eps=`."),
    (lambda: layer_norm(X, W, W, axis=0), "`axis`: layer_norm normalises the last axis"),
    (lambda: grouped_matmul(X, X, batch_sizes=SIZES), "no argument `batch_sizes`; use `group_sizes=`."),
    (lambda: grouped_matmul(X, X, groups_sizes=SIZES), "`groups_sizes`; did you mean `group_sizes=`?"),
    (lambda: grouped_matmul(X, X, SIZES, group_offset=0), "use `first_group=`."),
    (lambda: grouped_matmul_wgrad(X, X, SIZES, num_groups=1), "use `groups=`."),
    # an alias of another function in the module does not apply
    (lambda: grouped_matmul_wgrad(X, X, SIZES, scale=1.0), "`scale`; its arguments are lhs, rhs, group_sizes"),
    (lambda: Scaled()(X, W, row=2), "Scaled has no argument `row`; did you mean `rows=`?"),
    (lambda: Scaled()(X, W, config=2), "Scaled has no argument `config`; did you mean `cfg=`?"),
    (lambda: Scaled()(X, W, W), "Scaled takes 2 arguments by position (x, w), got 3"),
    (lambda: Prepared()(X, W, row=2), "Prepared has no argument `row`; did you mean `rows=`?"),
    (lambda: tuned(X, row=2), "tuned has no argument `row`; did you mean `rows=`?"),
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message[:60] for _, message in CALLS])
def test_an_unsupported_call_is_an_error_with_the_argument_to_use(call, message):
    with pytest.raises(TypeError) as raised:
        call()
    assert message in str(raised.value)
    assert isinstance(raised.value, CallError)
    assert isinstance(raised.value, EjkernelError)


def test_a_type_error_inside_the_function_is_unchanged():
    @names_checked({})
    def fails(x):
        raise TypeError("its own")

    for call in (lambda: fails(1), lambda: RaisesTypeError()(X, W)):
        with pytest.raises(TypeError, match=r"^its own") as raised:
            call()
        assert not isinstance(raised.value, CallError)


def test_a_wrong_value_stays_an_argument_error():
    with pytest.raises(ArgumentError, match="softmax_scale must be a positive number"):
        flash_attention(Q, Q, Q, softmax_scale=-1.0)


def test_functions_keep_their_signature_and_documentation():
    signature = inspect.signature(flash_attention)
    assert list(signature.parameters)[:4] == ["query", "key", "value", "causal"]
    assert "cfg" in signature.parameters
    assert flash_attention.__doc__.startswith("Return softmax attention")
    assert (flash_attention.__module__, flash_attention.__qualname__) == (
        "ejkernel.modules.flash_attention",
        "flash_attention",
    )
    assert str(inspect.signature(tuned)) == "(x, *, rows=1)"


@pytest.mark.parametrize(
    ("name", "names", "wanted"),
    [
        ("cudn", ["cudnn", "xla"], "cudnn"),
        ("CUDNN", ["cudnn"], "cudnn"),
        ("flash", ["flash_attention_bucketed", "flash_attention", "rms_norm"], "flash_attention"),
        ("H200", ["tpu_v5e", "nvidia_h100_x2", "nvidia_h200"], "nvidia_h200"),
        ("200", ["nvidia_h200"], None),
        ("fl", ["flash_attention"], None),
        ("zzz", ["cudnn"], None),
        (3, ["3"], None),
    ],
)
def test_the_nearest_name_is_close_or_none(name, names, wanted):
    assert nearest(name, names) == wanted
    assert did_you_mean(name, names) == ("." if wanted is None else f"; did you mean {wanted!r}?")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flash_attention(Q, Q, Q, implementation="cudn"), "None; got 'cudn'; did you mean 'cudnn'?"),
        (lambda: flash_attention(Q, Q, Q, implementation=["xla", "mosaic"]), "did you mean 'mosaic_gpu'?"),
        (lambda: flash_attention(Q, Q, Q, implementation="zzz"), "None; got 'zzz'."),
        (lambda: flash_attention(Q, Q, Q, implementation=[]), "None; got []."),
        (lambda: flash_attention(Q, Q, Q, implementation=3), "None; got 3."),
        (lambda: FlashAttentionConfig(implementation="cudn"), "got 'cudn'; did you mean 'cudnn'?"),
        (lambda: flash_attention(Q, Q, Q, precision="hihgest"), "did you mean 'highest'?"),
        (lambda: grouped_matmul(X, jnp.ones((1, 8, 4)), SIZES, activation="sliu"), "did you mean 'silu'?"),
        (lambda: Settings({"EJKERNEL_ON_MISS": "eror"}).on_miss, "got 'eror'; did you mean 'error'?"),
        (lambda: Target.named("nvidia_h20"), "did you mean 'nvidia_h200'?"),
        (lambda: Target.named("H100"), "did you mean 'nvidia_h100'?"),
    ],
)
def test_a_misspelt_value_is_an_error_with_the_nearest_one(call, message):
    with pytest.raises(EjkernelError) as raised:
        call()
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["expain"], "No such command 'expain'. Did you mean 'explain'?"),
        (["cache", "prun"], "No such command 'prun'. Did you mean 'prune'?"),
        (["zzz"], "No such command 'zzz'.\n"),
        (["show", "--jsno"], "--json"),
    ],
)
def test_a_misspelt_command_is_an_error_with_the_nearest_one(capsys, arguments, message):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["cache"]])
def test_a_command_without_arguments_prints_its_help_once(capsys, arguments):
    main(arguments)
    printed = capsys.readouterr()
    text = printed.out + printed.err
    assert (text.count("Usage:"), text.count("Commands:"), text.count("Error")) == (1, 1, 0)
