# SPDX-License-Identifier: Apache-2.0
"""`linear_cross_entropy` and `token_log_probs`: the language-model head's loss without all logits in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ejkernel.kernels._numbers import accumulator, at_most_zero, is_integer
from ejkernel.kernels._options import canonical_flag, check_values, int32, positive
from ejkernel.kernels._varying import unify_varying
from ejkernel.kernels.linear_cross_entropy import _arguments as arguments
from ejkernel.kernels.linear_cross_entropy.common import Statistics, token_losses
from ejkernel.kernels.linear_cross_entropy.losses import Head, summed_losses, weighted
from ejkernel.kernels.linear_cross_entropy.operation import LinearCrossEntropy as LinearCrossEntropy
from ejkernel.kernels.linear_cross_entropy.operation import LinearCrossEntropyConfig as LinearCrossEntropyConfig
from ejkernel.kernels.linear_cross_entropy.operation import LinearCrossEntropyGradients as LinearCrossEntropyGradients
from ejkernel.kernels.linear_cross_entropy.operation import (
    LinearCrossEntropyGradientsConfig as LinearCrossEntropyGradientsConfig,
)
from ejkernel.kernels.linear_cross_entropy.operation import linear_cross_entropy as _linear_cross_entropy
from ejkernel.ops.core.types import Number
from ejkernel.ops.errors import ArgumentError, ConfigError
from ejkernel.ops.utils.messages.names import did_you_mean, names_checked
from ejkernel.ops.utils.values.scalars import Takes, given_text, python_numbers

from ._names import by_name

_range: Any = jnp.iinfo  # it has no annotations
_REDUCTIONS = ("mean", "sum", "none")
# The names in Optax, Tokamax, Liger, levanter, EasyDeL and PyTorch.
_NAMES_ELSEWHERE = by_name(
    {
        "linear_cross_entropy computes the logits; pass x= and weight=, the arguments of the last matmul.": "logits",
        "x": "hidden hidden_states input _input embeddings pred_embeddings",
        "weight= is the matrix of the last matmul; pass weights of tokens as token_weights.": "weights",
        "weight": "w lm_head_weight pred_lm_head kernel",
        "weight= with transpose_weight=True takes an embedding [V, d].": "embedding",
        "labels": "target targets target_ids target_y labels_ids",
        "token_weights": "attention_mask mask where loss_weight",
        "token_weights= has a weight for each token; weights of classes are not supported.": "ce_weight",
        "z_loss": "logsumexp_weight lse_square_scale z_loss_weight",
        "logits_soft_cap": "logit_soft_cap logit_softcap softcap soft_cap",
        "logits_scale": "logit_scale",
        "accumulation_dtype": "accum_dtype dtype",
        "label_smoothing": "smoothing",
        "vocab_axis": "vocab_parallel_axis",
        "return_lse=True returns the log-sum-exp; the z-loss is z_loss * lse ** 2.": "return_z_loss",
        "return_accuracy": "return_argmax return_token_accuracy",
        "cfg": "chunk_size block_sizes config",
    }
)
_LOG_PROBS_ELSEWHERE = _NAMES_ELSEWHERE | {
    "reduction": "token_log_probs returns one number for each token; add them up, or use linear_cross_entropy.",
    "z_loss": "token_log_probs has no z_loss; use linear_cross_entropy.",
    "label_smoothing": "token_log_probs has no label_smoothing; use linear_cross_entropy.",
    "return_lse": "token_log_probs returns log-probabilities; use linear_cross_entropy(..., reduction='none').",
}
_Config = LinearCrossEntropyConfig | LinearCrossEntropyGradientsConfig
Floats = Float[Array, "*batch"]


class _Options(TypedDict, total=False):
    """The options of both operations that do not affect the types of their results."""

    transpose_weight: bool
    bias: Float[Array, " V"] | None
    ignore_index: int | None
    logits_soft_cap: Number | None
    logits_scale: Number | None
    accumulation_dtype: DTypeLike | None
    precision: str | jax.lax.Precision | None
    vocab_axis: str | Sequence[str] | None
    memory_limit: int | None
    implementation: str | Sequence[str] | None


class _LossOptions(_Options, total=False):
    """Those of `linear_cross_entropy`."""

    token_weights: Float[Array, "*batch"] | Bool[Array, "*batch"] | None
    reduction: Literal["mean", "sum", "none"]
    label_smoothing: Number
    z_loss: Number
    cfg: _Config | None


class _LogProbsOptions(_Options, total=False):
    """Those of `token_log_probs`."""

    temperature: Number
    cfg: LinearCrossEntropyConfig | None


@overload
def linear_cross_entropy(
    x: Float[Array, "*batch d"],
    weight: Float[Array, "d V"] | Float[Array, "V d"],
    labels: Int[Array, "*batch"],
    *,
    return_lse: Literal[False] = False,
    return_accuracy: Literal[False] = False,
    **options: Unpack[_LossOptions],
) -> Float[Array, "*batch"]: ...


@overload
def linear_cross_entropy(
    x: Float[Array, "*batch d"],
    weight: Float[Array, "d V"] | Float[Array, "V d"],
    labels: Int[Array, "*batch"],
    *,
    return_lse: bool = False,
    return_accuracy: bool = False,
    **options: Unpack[_LossOptions],
) -> Any: ...


@names_checked(_NAMES_ELSEWHERE)
def linear_cross_entropy(
    x: Float[Array, "*batch d"],
    weight: Float[Array, "d V"] | Float[Array, "V d"],
    labels: Int[Array, "*batch"],
    *,
    transpose_weight: bool = False,
    bias: Float[Array, " V"] | None = None,
    token_weights: Float[Array, "*batch"] | Bool[Array, "*batch"] | None = None,
    ignore_index: int | None = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: Number = 0.0,
    z_loss: Number = 0.0,
    logits_soft_cap: Number | None = None,
    logits_scale: Number | None = None,
    accumulation_dtype: DTypeLike | None = None,
    return_lse: bool = False,
    return_accuracy: bool = False,
    precision: str | jax.lax.Precision | None = None,
    vocab_axis: str | Sequence[str] | None = None,
    memory_limit: int | None = None,
    implementation: str | Sequence[str] | None = None,
    cfg: _Config | None = None,
) -> Any:
    """Compute the cross-entropy of `softmax(x @ weight)` against integer labels, without all logits in memory.

    The logits are `s = cap * tanh(scale * (x @ weight + bias) / cap)`, without omitted terms, and a token's loss is
    `logsumexp(s) - s[label]`. Logits, sums and the loss are float32 (float64 for float64 arguments).

    With `reduction="mean"` or `"sum"`, the gradients of `x`, `weight` and `bias` are computed together with the loss:
    three matmuls of this size in all. With `reduction="none"` each token has its own cotangent, so the backward
    recomputes the logits: four matmuls. To weight tokens, pass `token_weights`, which stays at three matmuls. Without
    differentiation the call takes one matmul.

    The gradients are saved between forward and backward. Under `jax.checkpoint` only the inputs are, and the logits are
    computed twice, unless a policy saves `linear_cross_entropy.residuals`. If a `scan` sums the loss of micro-batches,
    differentiate inside the loop, or use `jax.checkpoint`: otherwise each step saves a gradient of the weight. The
    `vmap` of a scalar loss has a gradient of the weight per example: pass all examples to one call instead.

    Under `jit` over a mesh the call splits itself by tokens and by vocabulary; a sharded axis `d` is gathered.
    Inside `jax.shard_map`, the loss is that of the device's tokens, so use `reduction="sum"` with `psum`; and if each
    device holds a part of the vocabulary, pass the name of that mesh axis as `vocab_axis`.

    Args:
        x: Hidden states. Batch axes are merged: `explain` shows `[2, 384, 256]` as `f32[1,768,256]`, while `[768, 256]`
            is another call. `ejkernel bench --op` takes the shapes of your program.
        weight: Matrix of the last matmul, of the same dtype.
        labels: Index of each token's class, of any integer dtype. A label outside `0 <= label < V` other than
            `ignore_index` makes the loss and its gradients NaN.
        transpose_weight: Whether the weight is `[V, d]`, such as a tied embedding.
        bias: Added to the logits. A bias of -inf removes a column, such as padding of the vocabulary: it has
            probability 0, also under a soft cap, and label smoothing leaves it out.
        token_weights: A factor of each token's loss. It has a gradient.
        ignore_index: Tokens with this label have no loss and do not count; `None` ignores none.
        reduction: `mean`: the sum of weighted losses, divided by the sum of the weights, or the number of counted
            tokens; 0 if that is 0. `sum`: the sum. `none`: the loss of each token, `[*batch]`.
        label_smoothing: The share `a` of the target spread evenly over all `V` columns, as in PyTorch: the loss
            is `logsumexp(s) - (1 - a) * s[label] - a * mean(s)`.
        z_loss: Factor of `logsumexp(s) ** 2` in each token's loss.
        logits_soft_cap: Squash the logits into `(-cap, cap)` by `cap * tanh(x / cap)`, after scale and bias.
        logits_scale: Factor on the logits before the cap, e.g. the inverse of a temperature.
        accumulation_dtype: Dtype of the sum of the weight's gradient over chunks of tokens; by default the
            `accumulation_dtype` of the configuration, which is float32 unless tuned.
        return_lse: Whether to return `logsumexp(s)` of each token, `[*batch]`, as well. It has a gradient, which needs
            the logits again; a program that does not differentiate it does not compute them again.
        return_accuracy: Whether to return the accuracy as well: the weighted share of tokens whose label has the
            largest logit; with `reduction="none"`, 1 or 0 for each token. It has no gradient.
        precision: Of the matmuls, as for `jax.lax.dot`.
        vocab_axis: The axis of the enclosing `shard_map`, or several, over which the vocabulary is sharded. Labels
            count from the first column of the first device.
        memory_limit: Bytes that temporary arrays may take, on each device; it limits the choice and the search of a
            configuration. By default a quarter of the device's memory. A `KernelWarning` says if no configuration fits.
        implementation: An implementation (`mosaic_gpu`, `xla`), or several in order of preference; the call raises if
            none of them supports it. `None` leaves the choice to the configuration.
        cfg: A configuration: a `LinearCrossEntropyGradientsConfig` applies when a scalar loss is differentiated, and a
            `LinearCrossEntropyConfig` to all other calls. `None` looks one up.

    Returns:
        The loss; with `return_lse` or `return_accuracy` a tuple of the loss, the log-sum-exp and the accuracy, as far
        as requested.

    Raises:
        ArgumentError: An argument has the wrong shape, dtype or value.
        ConfigError: `cfg` and `implementation` name different implementations, or `cfg` does not fit the call.
        UnsupportedError: `implementation` cannot run this call; the message says why.
    """
    _check_reduction(reduction)
    return_lse = canonical_flag("return_lse", return_lse)
    return_accuracy = canonical_flag("return_accuracy", return_accuracy)
    loss = {
        "label_smoothing": arguments.fraction("label_smoothing", python_numbers(label_smoothing, Takes.NUMBERS)),
        "z_loss": arguments.nonnegative("z_loss", python_numbers(z_loss, Takes.NUMBERS)),
    }
    head, tokens = _prepared(
        (x, weight, labels, bias, token_weights),
        ignore_index,
        cfg,
        transpose_weight=transpose_weight,
        logits_soft_cap=logits_soft_cap,
        logits_scale=logits_scale,
        accumulation_dtype=accumulation_dtype,
        precision=precision,
        vocab_axis=vocab_axis,
        memory_limit=memory_limit,
        implementation=implementation,
    )
    if reduction == "none":
        names = (*(["sum"] if loss["label_smoothing"] else []), *(["max"] if return_accuracy else []))
        found = head.statistics(names)
        out = weighted(tokens.factors, token_losses(found, columns=head.columns, **loss))
    else:
        factors = _averaging(tokens.factors, tokens.weights) if reduction == "mean" else tokens.factors
        out, found = summed_losses(head, factors, **loss, with_max=return_accuracy, with_lse=return_lse)
    more = [found.lse] if return_lse else []
    more += [_accuracy(found, tokens, reduction)] if return_accuracy else []
    return (out, *more) if more else out


@overload
def token_log_probs(
    x: Float[Array, "*batch d"],
    weight: Float[Array, "d V"] | Float[Array, "V d"],
    labels: Int[Array, "*batch"],
    *,
    return_entropy: Literal[False] = False,
    **options: Unpack[_LogProbsOptions],
) -> Float[Array, "*batch"]: ...


@overload
def token_log_probs(
    x: Float[Array, "*batch d"],
    weight: Float[Array, "d V"] | Float[Array, "V d"],
    labels: Int[Array, "*batch"],
    *,
    return_entropy: Literal[True],
    **options: Unpack[_LogProbsOptions],
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]: ...


@names_checked(_LOG_PROBS_ELSEWHERE)
def token_log_probs(
    x: Float[Array, "*batch d"],
    weight: Float[Array, "d V"] | Float[Array, "V d"],
    labels: Int[Array, "*batch"],
    *,
    transpose_weight: bool = False,
    bias: Float[Array, " V"] | None = None,
    temperature: Number = 1.0,
    ignore_index: int | None = -100,
    logits_soft_cap: Number | None = None,
    logits_scale: Number | None = None,
    accumulation_dtype: DTypeLike | None = None,
    return_entropy: bool = False,
    precision: str | jax.lax.Precision | None = None,
    vocab_axis: str | Sequence[str] | None = None,
    memory_limit: int | None = None,
    implementation: str | Sequence[str] | None = None,
    cfg: LinearCrossEntropyConfig | None = None,
) -> Any:
    """Return the log-probability of each label under `softmax(x @ weight / temperature)`, without all logits in memory.

    Use it for policy gradients, distillation and scoring: each token's result has its own cotangent, and the entropy
    as well. The backward recomputes the logits: four matmuls in all, and one without differentiation.

    Args:
        x, weight, labels, transpose_weight, bias: See `linear_cross_entropy`.
        temperature: Divides the logits, after scale and cap.
        ignore_index: Tokens with this label get the log-probability 0; `None` ignores none.
        logits_soft_cap, logits_scale, accumulation_dtype: See `linear_cross_entropy`.
        return_entropy: Whether to return the entropy of each token's distribution as well.
        precision, vocab_axis, memory_limit, implementation: See `linear_cross_entropy`.
        cfg: The configuration of this call and its gradient; `None` looks one up.

    Returns:
        The log-probabilities, `[*batch]` in float32; with `return_entropy`, and the entropies in nats.

    Raises:
        ArgumentError: An argument has the wrong shape, dtype or value.
        ConfigError: `cfg` and `implementation` name different implementations, or `cfg` does not fit the call.
        UnsupportedError: `implementation` cannot run this call; the message says why.
    """
    return_entropy = canonical_flag("return_entropy", return_entropy)
    heat = positive("temperature", python_numbers(temperature, Takes.NUMBERS))
    if heat is None:
        raise ArgumentError("temperature must be a positive number, got None; 1 leaves the logits unchanged.")
    scale, cap = (
        positive(name, python_numbers(value, Takes.NUMBERS))
        for name, value in (("logits_scale", logits_scale), ("logits_soft_cap", logits_soft_cap))
    )
    head, tokens = _prepared(
        (x, weight, labels, bias, None),
        ignore_index,
        cfg,
        transpose_weight=transpose_weight,
        # cap * tanh(s / cap) / t is a cap of cap / t on s / t
        logits_soft_cap=None if cap is None else cap / heat,
        logits_scale=(1.0 if scale is None else scale) / heat,
        accumulation_dtype=accumulation_dtype,
        precision=precision,
        vocab_axis=vocab_axis,
        memory_limit=memory_limit,
        implementation=implementation,
    )
    found = head.statistics(("expected",) if return_entropy else ())
    out = weighted(tokens.factors, at_most_zero(found.label - found.lse))
    return (out, -at_most_zero(found.expected - found.lse)) if return_entropy and found.expected is not None else out


class _Tokens(NamedTuple):
    """Numbers of each token.

    Attributes:
        weights: The weight; 0 where the token is ignored.
        factors: The weight; NaN where the label is not a column.
    """

    weights: jax.Array
    factors: jax.Array


def _prepared(
    arrays: tuple[Any, ...], ignore_index: Any, cfg: Any, *, implementation: Any, vocab_axis: Any, **given: Any
) -> tuple[Head, _Tokens]:
    """Check the arguments; return the head and the weights of the tokens."""
    x, weight, labels, bias, token_weights = arrays
    if cfg is not None and not isinstance(cfg, LinearCrossEntropyConfig | LinearCrossEntropyGradientsConfig):
        raise ConfigError(
            f"cfg must be a LinearCrossEntropyConfig or a LinearCrossEntropyGradientsConfig, got {type(cfg).__name__}."
        )
    options = arguments.canonical_options(
        **{name: python_numbers(value, Takes.NUMBERS) for name, value in given.items()}
    )
    axes = arguments.canonical_axis(vocab_axis)
    transposed = options.get("transpose_weight", False)
    arguments.check_operands(x, weight, labels, bias, transpose_weight=transposed)
    check_values(x=x, weight=weight, labels=labels, bias=bias, token_weights=token_weights)
    counted = _counted(labels, ignore_index)
    x, weight, labels = jnp.asarray(x), jnp.asarray(weight), int32(labels)
    first, columns = _columns(weight.shape[0 if transposed else 1], axes)
    dtype = accumulator(x.dtype)
    weights = counted.astype(dtype)
    if token_weights is not None:
        arguments.check_token_weights(token_weights, x)
        weights = jnp.where(counted, jnp.asarray(token_weights).astype(dtype), 0)
    factors = jnp.where(counted & ((labels < 0) | (labels >= columns)), jnp.nan, weights)
    # The sum over devices of the gradient of a replicated argument then runs in the argument's dtype.
    x, weight, bias = unify_varying((x, weight, None if bias is None else jnp.asarray(bias)))
    options |= {"implementation": _linear_cross_entropy.requested(implementation)}
    options.pop("vocab_axis")
    head = Head(x=x, weight=weight, bias=bias, labels=labels - first, options=options, vocab_axis=axes, cfg=cfg)
    return head, _Tokens(weights, factors)


def _check_reduction(reduction: Any) -> None:
    if not isinstance(reduction, str) or reduction not in _REDUCTIONS:
        raise ArgumentError(
            f"reduction must be one of {', '.join(_REDUCTIONS)}; got {reduction!r}"
            f"{did_you_mean(reduction, _REDUCTIONS)}"
        )


def _counted(labels: Any, ignore_index: Any) -> jax.Array:
    """Return which labels count: all that differ from the index, which their dtype may not hold."""
    index = python_numbers(ignore_index, Takes.NUMBERS)
    if index is not None and not is_integer(index):
        raise ArgumentError(f"ignore_index must be an integer or None, got {given_text(ignore_index)}.")
    numbers = _range(labels.dtype)
    if index is None or not numbers.min <= index <= numbers.max:
        return jnp.ones(labels.shape, bool)
    return jnp.asarray(labels != np.asarray(index, labels.dtype))


def _columns(own: Any, vocab_axis: tuple[str, ...]) -> tuple[Any, Any]:
    """Return the first column of this device, and the number of columns of all devices."""
    if not vocab_axis:
        return 0, own
    try:
        return lax.axis_index(vocab_axis) * own, lax.axis_size(vocab_axis) * own
    except NameError as error:
        got = vocab_axis[0] if len(vocab_axis) == 1 else vocab_axis
        raise ArgumentError(
            f"vocab_axis must be a mesh axis of an enclosing jax.shard_map, or several, got {got!r}; under jit over a "
            "mesh, leave it out: the call splits itself."
        ) from error


def _averaging(factors: jax.Array, weights: jax.Array) -> jax.Array:
    """Return factors that make the sum of losses their mean; 0 if the weights add up to 0."""
    total = weights.sum()
    return jnp.where(total == 0, 0, factors / jnp.where(total == 0, 1, total))


def _accuracy(found: Statistics, tokens: _Tokens, reduction: str) -> jax.Array:
    top = found.label if found.max is None else found.max
    # the factor of a token whose label is no column is NaN, and its logit is 0, which may be the largest
    hits = ((found.label >= top) & (tokens.weights != 0) & ~jnp.isnan(tokens.factors)).astype(tokens.weights.dtype)
    if reduction == "none":
        return hits
    return (hits * _averaging(tokens.weights, tokens.weights)).sum()
