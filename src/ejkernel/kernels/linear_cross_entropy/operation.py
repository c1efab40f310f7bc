# SPDX-License-Identifier: Apache-2.0
"""The operations behind the module: statistics of the logits, and the gradients of a loss with them.

`linear_cross_entropy` returns the statistics of each token: one product forward, three more backward, because the
backward recomputes the logits. Per-token losses and undifferentiated losses use it. `linear_cross_entropy_gradients`
returns the statistics and the gradients of `sum(factors * losses)`: three products in all. A scalar loss under `grad`
uses it; the loss's cotangent is then a scalar factor. `losses.py` composes losses from the two.

The contract of an implementation. It sees two-dimensional arrays with at least one row:

    x [tokens, d]; weight [d, V], or [V, d] if call.transpose_weight; labels int32 [tokens]; bias [V] or absent.
    logits = cap * tanh((x @ weight + bias) * scale / cap), in float32; a bias of -inf removes a column.

A label outside `0 <= label < V` hits no column: its logit is 0, and no `-1` enters its gradient. Statistics are float32
`[tokens]`: the log-sum-exp, the label's logit, then those of `call.statistics` in the order of `STATISTICS`; see
`Statistics`. `features` lists the options that an implementation supports; see `LinearCrossEntropyCall.features`.

*Statistics* (`linear_cross_entropy`). `forward(call, x, weight, labels[, bias])` returns `(statistics, ())`: a tuple,
and no residuals. `backward(call, (), statistics, cotangents, x, weight, labels[, bias])` returns `(dx, dweight, None[,
dbias])` in the arguments' dtypes. `cotangents` is a tuple parallel to the statistics, any numbers. The softmax is
`exp(logits - statistics[0])`: under a sharded vocabulary this log-sum-exp is that of all devices, so the backward needs
no collective. `coefficients_of_statistics` has the formula; the maximum has no gradient. `vocab_axis` is never set.

*Gradients* (`linear_cross_entropy_gradients`). `forward(call, x, weight, labels, factors[, bias])` returns
`((*statistics, *gradients), ())`: the gradients of `sum(factors * losses)` for the members of `call.gradients`, in the
order of `GRADIENTS` and in the arguments' dtypes; do not compute others. `factors` is float32 `[tokens]`, 0 for ignored
tokens; it includes the weights and the denominator of a mean. `coefficients_of_loss` has the formula.
`label_smoothing` needs the statistic `sum`, which is then among `call.statistics`. If `call.vocab_axis` is set, the
device has some columns, and its labels count from its first column: call `merged_lse` before forming the gradients,
return the merged log-sum-exp and `merged_max`, and leave the other results local; the caller sums them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels._options import int32
from ejkernel.kernels._varying import unify_varying
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.sharding.rule import ShardingRule
from ejkernel.ops.core.sharding.split import CallPart
from ejkernel.ops.core.types import Cost
from ejkernel.ops.implementation import Implementations, LazyImplementation, OperationConfig
from ejkernel.ops.operation import Operation
from ejkernel.ops.utils.values.signature import is_known

from . import _arguments as arguments
from . import reference
from .common import LinearCrossEntropyCall, Statistics, merged_lse, merged_max, summable

RESIDUALS = "none: the output has the log-sum-exp"
_Cfg = TypeVar("_Cfg", bound=OperationConfig)
Results = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinearCrossEntropyConfig(OperationConfig):
    """Configuration of one call of `linear_cross_entropy`, forward or backward; see `OperationConfig`.

    Attributes:
        implementation: Name of the implementation.
        fwd: Its parameters for the forward; `None`: its heuristic's.
        bwd: Its parameters for the backward; `None`: its heuristic's.
    """

    implementation: str = "xla"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinearCrossEntropyGradientsConfig(OperationConfig):
    """Configuration of one call of `linear_cross_entropy_gradients`, which `linear_cross_entropy` makes under `grad`.

    Attributes:
        implementation: Name of the implementation.
        fwd: Its parameters; `None`: its heuristic's.
        bwd: Not used, because gradients are other calls with their own configurations; `None`, or parameters of the
            implementation's backward.
    """

    implementation: str = "xla"


class _OnLogits(Operation[_Cfg, LinearCrossEntropyCall, Results], Generic[_Cfg]):
    """Base of both operations: rows with any leading axes, and a vocabulary that may be sharded."""

    def describe(self, x: Any, weight: Any, *others: Any, vocab_axis: str, vocab_shares: bool, **options: Any) -> Any:
        """Return the sizes, dtypes and options of a call."""
        transposed = options.get("transpose_weight", False)
        return LinearCrossEntropyCall(
            tokens=math.prod(x.shape[:-1]),
            inner=x.shape[-1],
            columns=weight.shape[0 if transposed else 1],
            dtype=str(x.dtype),
            bias=self._bias(others) is not None,
            vocab_axis=_axes(vocab_axis),
            **options,
        )

    def _bias(self, others: tuple[Any, ...]) -> Any:
        raise NotImplementedError

    def run(self, *args: Any, cfg: _Cfg, **options: Any) -> Any:
        """Return the statistics and the operation's other results."""
        flat, batch = _flattened(args)
        if not all(flat[0].shape[:1]):
            found, _ = unify_varying((self._of_no_tokens(args, options), args))
            return found
        found = self._shares(super().run(*flat, cfg=cfg, **options), options)
        return _with_tokens(found, options, batch)

    def fwd_with_residuals(self, *args: Any, cfg: _Cfg, **options: Any) -> tuple[Any, Any]:
        """Return the results; the backward needs nothing else."""
        return self.run(*args, cfg=cfg, **options), ()

    def vjp(
        self,
        residuals: Any,
        out: Any,
        cotangents: tuple[Any, ...],
        *args: Any,
        cfg: _Cfg,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Return the gradient of each argument."""
        flat, _ = _flattened(args)
        if not all(flat[0].shape[:1]):
            return tuple(_zeros_or_none(x) for x in args)
        own, given = (_with_tokens(arrays, options, flat[2].shape) for arrays in (out, cotangents))
        found = super().vjp(residuals, own, given, *flat, cfg=cfg, **options)
        return tuple(None if y is None else y.reshape(like.shape) for y, like in zip(found, args, strict=True))

    def _shares(self, results: Results, options: dict[str, Any]) -> Results:
        """Return this device's share of the results of a call with summed shards."""
        axes = _axes(options["vocab_axis"])
        if not options["vocab_shares"]:
            return results
        names = options.get("statistics", ())
        found, rest = Statistics.of(results, names), results[2 + len(names) :]
        found = self._merged(found, axes)
        # The other devices have the same numbers, and shards are summed.
        first = lax.axis_index(axes) == 0
        top = None if found.max is None else jnp.where(first, found.max, 0)
        return *found._replace(lse=jnp.where(first, found.lse, 0), max=top).results(), *rest

    def _merged(self, found: Statistics, axes: tuple[str, ...]) -> Statistics:
        return found

    def _of_no_tokens(self, args: tuple[Any, ...], options: dict[str, Any]) -> Results:
        count = 2 + len(options.get("statistics", ()))
        return (jnp.zeros(args[2].shape, jnp.float32),) * count

    def part_arguments(self, part: CallPart, *args: Any, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a shard; labels count from the first of its columns."""
        if not part.is_split("vocab"):
            return args, options
        x, weight, labels, *others = args
        labels = labels - jnp.asarray(part.start("vocab"), labels.dtype)
        return (x, weight, labels, *others), options | {
            "vocab_axis": ",".join(part.axes("vocab")),
            "vocab_shares": True,
        }

    def bucket(self, inv: Invocation[_Cfg, Results]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the same call without collectives, with all tokens along one axis: such calls take equally long."""
        options = {**inv.abstract_kwargs, "vocab_axis": "", "vocab_shares": False}
        batch = inv.abstract_args[0].shape[:-1]
        if not batch or not all(is_known(*x.shape) for x in inv.abstract_args if x is not None):
            return inv.abstract_args, inv.abstract_kwargs
        args = _with_batch(inv.abstract_args, (*[1] * (len(batch) - 1), math.prod(batch)))
        same = self.able(dataclasses.replace(inv, args=args, kwargs=options)) == self.able(inv)
        return (args, options) if same else (inv.abstract_args, inv.abstract_kwargs)

    def example_inputs(
        self, inv: Invocation[_Cfg, Results], rng: np.random.Generator
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return random rows with logits of moderate size, and labels among the columns."""
        (x, weight, labels, *others), kwargs = super().example_inputs(inv, rng)
        call = self.call_of(inv)
        x = (x * (2 / max(1, call.inner) ** 0.5)).astype(x.dtype)
        labels = jnp.asarray(rng.integers(0, call.columns, labels.shape), labels.dtype)
        return (x, weight, labels, *others), kwargs

    def _rule(self, inv: Invocation[_Cfg, Results]) -> tuple[str, str]:
        """Return the axes of the weight, and those of the statistics."""
        weight = "vocab inner" if inv.kwargs.get("transpose_weight") else "inner vocab"
        return weight, ", ".join(["..."] * (2 + len(inv.kwargs.get("statistics", ()))))

    def cost(self, inv: Invocation[_Cfg, Results]) -> Cost | None:
        """Return the work of the products; each array is read or written once."""
        call = self.call_of(inv)
        if inv.direction not in ("fwd", "bwd") or not is_known(call.tokens, call.inner, call.columns):
            return None
        products = 3 if inv.direction == "bwd" else 1 + sum(name != "bias" for name in call.gradients)
        flops = 2 * products * call.examples * call.tokens * call.inner * call.columns
        numbers = call.tokens * call.inner * ("x" in call.gradients)
        numbers += call.inner * call.columns * ("weight" in call.gradients)
        return Cost(flops=flops, bytes=inv.input_bytes + call.examples * numbers * jnp.dtype(call.dtype).itemsize)


class LinearCrossEntropy(_OnLogits[LinearCrossEntropyConfig]):
    """The operation that returns statistics of each token's logits; its gradient recomputes the logits."""

    implementations = Implementations(
        {
            "mosaic_gpu": LazyImplementation(f"{__package__}.mosaic_gpu.implementation:MosaicGpu", platforms=("gpu",)),
            "xla": f"{__package__}.xla:Xla",
        }
    )

    def __init__(self) -> None:
        super().__init__(name="linear_cross_entropy")

    def prepare(
        self,
        x: Any,
        weight: Any,
        labels: Any,
        bias: Any = None,
        *,
        statistics: Any = (),
        transpose_weight: Any = False,
        logits_soft_cap: Any = None,
        logits_scale: Any = None,
        accumulation_dtype: Any = None,
        precision: Any = None,
        memory_limit: Any = None,
        vocab_axis: Any = None,
        vocab_shares: Any = False,
        implementation: Any = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arguments, and drop options with default values, which the key omits."""
        options = arguments.canonical_options(
            transpose_weight=transpose_weight,
            logits_soft_cap=logits_soft_cap,
            logits_scale=logits_scale,
            accumulation_dtype=accumulation_dtype,
            precision=precision,
            memory_limit=memory_limit,
            vocab_axis=vocab_axis,
        )
        arguments.check_operands(x, weight, labels, bias, transpose_weight=options.get("transpose_weight", False))
        asked = arguments.canonical_statistics(statistics)
        options |= ({"statistics": asked} if asked else {}) | {"vocab_shares": vocab_shares}
        args = (x, weight, int32(labels), bias)[: 3 if bias is None else 4]
        return args, options | {"implementation": self.requested(implementation)}

    def _bias(self, others: tuple[Any, ...]) -> Any:
        return others[1] if len(others) > 1 else None

    def _merged(self, found: Statistics, axes: tuple[str, ...]) -> Statistics:
        own = summable(found, merged_lse(found.lse, axes))
        return own._replace(max=merged_max(own.max, axes))

    def describe(self, *args: Any, **options: Any) -> LinearCrossEntropyCall:
        """Return the sizes, dtypes and options; implementations compute the statistics of the columns at hand."""
        call: LinearCrossEntropyCall = super().describe(*args, **options | {"vocab_axis": ""})
        return call

    def sharding_rule(self, inv: Invocation[LinearCrossEntropyConfig, Results]) -> ShardingRule:
        """Return a rule that splits tokens and vocabulary; see `part_arguments` for the latter."""
        weight, statistics = self._rule(inv)
        bias = ", vocab" * (len(inv.args) > 3)
        # Not the inner axis: the log-sum-exp needs complete logits.
        return ShardingRule(f"... inner, {weight}, ...{bias} -> {statistics}", split="... vocab", residuals="")

    def reference(self, *args: Any, **options: Any) -> Any:
        """Return the statistics by the plain formula, in float32."""
        x, weight, labels, *bias = args
        call = self.describe(*args, **options)
        found = reference.statistics(x, weight, labels, bias[0] if bias else None, call)
        return reference.wanted(found, call.statistics).results()

    def typical_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call with a small vocabulary."""
        return _TYPICAL[:3], {}


class LinearCrossEntropyGradients(_OnLogits[LinearCrossEntropyGradientsConfig]):
    """The operation that returns statistics, and gradients of the weighted sum of losses, with three products."""

    implementations = Implementations(
        {
            "mosaic_gpu": LazyImplementation(
                f"{__package__}.mosaic_gpu.implementation:MosaicGpuGradients", platforms=("gpu",)
            ),
            "xla": f"{__package__}.xla:XlaGradients",
        }
    )

    def __init__(self) -> None:
        super().__init__(name="linear_cross_entropy_gradients")

    def prepare(
        self,
        x: Any,
        weight: Any,
        labels: Any,
        factors: Any = None,
        bias: Any = None,
        *,
        gradients: Any = ("x", "weight"),
        statistics: Any = (),
        transpose_weight: Any = False,
        label_smoothing: Any = 0.0,
        z_loss: Any = 0.0,
        logits_soft_cap: Any = None,
        logits_scale: Any = None,
        accumulation_dtype: Any = None,
        precision: Any = None,
        memory_limit: Any = None,
        vocab_axis: Any = None,
        vocab_shares: Any = False,
        implementation: Any = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arguments, and drop options with default values, which the key omits; `factors` default to 1."""
        canonical = arguments.canonical_options(
            transpose_weight=transpose_weight,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            logits_soft_cap=logits_soft_cap,
            logits_scale=logits_scale,
            accumulation_dtype=accumulation_dtype,
            precision=precision,
            memory_limit=memory_limit,
            vocab_axis=vocab_axis,
        )
        arguments.check_operands(x, weight, labels, bias, transpose_weight=canonical.get("transpose_weight", False))
        if factors is None:
            ones = jax.ShapeDtypeStruct(labels.shape, jnp.float32)
            factors = ones if isinstance(labels, jax.ShapeDtypeStruct) else jnp.ones_like(ones)
        arguments.check_token_weights(factors, x)
        asked = {*arguments.canonical_statistics(statistics), *(["sum"] if "label_smoothing" in canonical else [])}
        canonical |= {"gradients": arguments.canonical_gradients(gradients), "vocab_shares": vocab_shares}
        canonical |= {"statistics": arguments.canonical_statistics(tuple(asked))} if asked else {}
        args = (x, weight, int32(labels), factors, bias)[: 4 if bias is None else 5]
        return args, canonical | {"implementation": self.requested(implementation)}

    def _bias(self, others: tuple[Any, ...]) -> Any:
        return others[2] if len(others) > 2 else None

    def sharding_rule(self, inv: Invocation[LinearCrossEntropyGradientsConfig, Results]) -> ShardingRule:
        """Return a rule that splits tokens and vocabulary; a gradient without one of these axes is a sum."""
        weight, statistics = self._rule(inv)
        bias = ", vocab" * (len(inv.args) > 4)
        axes = {"x": "... inner", "weight": weight, "bias": "vocab"}
        results = ", ".join([statistics, *(axes[name] for name in inv.kwargs["gradients"])])
        return ShardingRule(f"... inner, {weight}, ..., ...{bias} -> {results}", split="... vocab", residuals="")

    def example_inputs(
        self, inv: Invocation[LinearCrossEntropyGradientsConfig, Results], rng: np.random.Generator
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """See the base; the factors are those of a mean, with some tokens ignored."""
        (x, weight, labels, factors, *others), kwargs = super().example_inputs(inv, rng)
        drawn = rng.random(factors.shape) < 0.9
        factors = jnp.asarray(drawn / max(1, drawn.size), factors.dtype)
        return (x, weight, labels, factors, *others), kwargs

    def _of_no_tokens(self, args: tuple[Any, ...], options: dict[str, Any]) -> Results:
        arrays = {"x": args[0], "weight": args[1], "bias": self._bias(args[2:])}
        return *super()._of_no_tokens(args, options), *(jnp.zeros_like(arrays[name]) for name in options["gradients"])

    def reference(self, *args: Any, **options: Any) -> Any:
        """Return statistics and gradients by the plain formula, in float32."""
        x, weight, labels, factors, *bias = args
        call = self.describe(*args, **options)
        found, gradients = reference.loss_and_gradients(x, weight, labels, factors, bias[0] if bias else None, call)
        return *reference.wanted(found, call.statistics).results(), *(gradients[name] for name in call.gradients)

    def typical_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call with a small vocabulary."""
        return _TYPICAL, {}


linear_cross_entropy = LinearCrossEntropy()
linear_cross_entropy_gradients = LinearCrossEntropyGradients()

_TYPICAL = (
    jax.ShapeDtypeStruct((1024, 256), jnp.bfloat16),
    jax.ShapeDtypeStruct((256, 4096), jnp.bfloat16),
    jax.ShapeDtypeStruct((1024,), jnp.int32),
    jax.ShapeDtypeStruct((1024,), jnp.float32),
)


def _flattened(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Return the arguments with one axis of tokens, and the axes that it replaces."""
    batch = args[0].shape[:-1]
    return (args if len(batch) == 1 else _with_batch(args, (math.prod(batch),))), batch


def _with_batch(args: tuple[Any, ...], batch: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the arguments with these axes of tokens."""
    x, weight, labels, *others = args
    if labels.shape == batch:
        return args
    # Factors have the labels' shape; a bias has one axis, and the labels have more here.
    last = [_reshaped(y, batch) if y.shape == labels.shape else y for y in others]
    return (_reshaped(x, (*batch, x.shape[-1])), weight, _reshaped(labels, batch), *last)


def _with_tokens(results: Results, options: dict[str, Any], batch: tuple[int, ...]) -> Results:
    """Return statistics and gradients, or their cotangents, with these axes of tokens."""
    count = 2 + len(options.get("statistics", ()))
    gradients = zip(options.get("gradients", ()), results[count:], strict=True)
    return *(y.reshape(batch) for y in results[:count]), *(
        y.reshape((*batch, y.shape[-1])) if name == "x" else y for name, y in gradients
    )


def _axes(vocab_axis: str) -> tuple[str, ...]:
    """Return the mesh axes in the option `vocab_axis`: a text, so that the representative of a call may lack it."""
    return tuple(vocab_axis.split(",")) if vocab_axis else ()


def _reshaped(x: Any, shape: tuple[int, ...]) -> Any:
    return jax.ShapeDtypeStruct(shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x.reshape(shape)


def _zeros_or_none(x: Any) -> Any:
    return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.inexact) else None
