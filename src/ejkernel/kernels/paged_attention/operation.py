# SPDX-License-Identifier: Apache-2.0
"""The operation behind `paged_attention`: arguments, reference, example batches, and implementations."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._options import canonical_flag, canonical_scale, canonical_sinks, int32, positive
from ejkernel.ops.core.bucketing import bucketed
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.sharding.rule import ShardingRule
from ejkernel.ops.core.types import Cost
from ejkernel.ops.implementation import Implementations, LazyImplementation, OperationConfig
from ejkernel.ops.operation import Operation
from ejkernel.ops.utils.values.signature import is_known

from . import _arguments as arguments
from . import reference
from .common import Operands, PagedCall
from .examples import Batch, measured_batches
from .plan import PagedPlan, plan_arrays

_Invocation = Invocation["PagedAttentionConfig", Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PagedAttentionConfig(OperationConfig):
    """Configuration of one call of `paged_attention`; only `fwd` counts, because there is no gradient."""

    implementation: str = "xla"


class PagedAttention(Operation[PagedAttentionConfig, PagedCall, Any]):
    """The operation behind `paged_attention`; see there for the arguments."""

    implementations = Implementations(
        {
            "mosaic_gpu": LazyImplementation(f"{__package__}.mosaic_gpu.implementation:MosaicGpu", platforms=("gpu",)),
            "xla": f"{__package__}.xla:Xla",
            "tpu_ragged": LazyImplementation(f"{__package__}.tpu_ragged:TpuRagged", platforms=("tpu",)),
        }
    )
    why_no_gradient = "it reads a cache, for inference; to train, use flash_attention."

    def __init__(self) -> None:
        super().__init__(name="paged_attention")

    def prepare(  # noqa: PLR0917 - the arrays are positional
        self,
        q: Any,
        kv_pages: Any,
        page_table: Any,
        query_offsets: Any,
        kv_lengths: Any,
        sinks: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        plan: Any = None,
        *,
        softmax_scale: Any = None,
        logits_soft_cap: Any = None,
        sliding_window: Any = None,
        value_dim: Any = None,
        return_lse: Any = False,
        planned_for: Any = None,
        implementation: Any = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arguments, and drop options with default values, which the key omits."""
        arguments.check_main(q, kv_pages)
        arguments.check_batch(page_table, query_offsets, kv_lengths)
        window = arguments.canonical_window(sliding_window)
        options = {
            "logits_soft_cap": positive("logits_soft_cap", logits_soft_cap),
            "sliding_window": window,
            "value_dim": arguments.canonical_value_dim(value_dim, v_scale, kv_pages),
            "return_lse": canonical_flag("return_lse", return_lse) or None,
            "planned_for": plan.made_for if isinstance(plan, PagedPlan) else planned_for,
        }
        args = (
            q,
            kv_pages,
            *map(int32, (page_table, query_offsets, kv_lengths)),
            canonical_sinks(sinks, q.shape[1]),
            arguments.canonical_scales("k_scale", k_scale, kv_pages.shape[2]),
            arguments.canonical_scales("v_scale", v_scale, kv_pages.shape[2]),
            arguments.canonical_plan(plan, q, kv_pages, page_table, window),
        )
        scale = canonical_scale(softmax_scale, q.shape[2])
        said = {name: value for name, value in options.items() if value is not None}
        return args, said | {"softmax_scale": scale, "implementation": self.requested(implementation)}

    def describe(self, *args: Any, **options: Any) -> PagedCall:
        """Return the shapes, dtypes and options of a call."""
        given = Operands(*args)
        return PagedCall(
            q=tuple(given.q.shape),
            pages=tuple(given.kv_pages.shape),
            table=tuple(given.page_table.shape),
            dtype=str(given.q.dtype),
            cache_dtype=str(given.kv_pages.dtype),
            scale=options["softmax_scale"],
            soft_cap=options.get("logits_soft_cap"),
            window=options.get("sliding_window"),
            value_dim=options.get("value_dim"),
            return_lse=options.get("return_lse", False),
            sinks=given.sinks is not None,
            scales=given.k_scale is not None or given.v_scale is not None,
            planned_for=options.get("planned_for"),
        )

    def reference(self, *args: Any, **options: Any) -> Any:
        """Return the output, and the log-sum-exp if the call returns it, by the plain formula in float32."""
        call = self.describe(*args, **options)
        out, lse = reference.attention(call, args)
        out = out.astype(args[0].dtype)
        return (out, lse) if call.return_lse else out

    def bucket(self, inv: _Invocation) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with tokens, sequences and pages rounded up to powers of two.

        A serving process then has tens of keys. Every configuration runs for every batch, because blocks of pages are
        clipped to the table.
        """
        own, options = inv.abstract_args, inv.abstract_kwargs
        given = Operands(*own)
        if not is_known(given.q.shape[0], given.kv_pages.shape[0], *given.page_table.shape):
            return own, options
        lengths = bucketed(given.kv_lengths, 0)
        offsets: Any = jax.ShapeDtypeStruct((lengths.shape[0] + 1,), jnp.int32)
        rounded = given._replace(
            q=bucketed(given.q, 0),
            kv_pages=bucketed(given.kv_pages, 0),
            page_table=bucketed(given.page_table, 0, 1),
            query_offsets=offsets,
            kv_lengths=lengths,
        )
        if given.plan is not None:
            shape = self.describe(*rounded, **{n: x for n, x in options.items() if n != "implementation"}).planned_shape
            made: Any = jax.eval_shape(functools.partial(plan_arrays, shape), *rounded[2:5])
            rounded = rounded._replace(plan=tuple(made))  # type: ignore[arg-type]
        same = self.able(dataclasses.replace(inv, args=tuple(rounded))) == self.able(inv)
        return (tuple(rounded), options) if same else (own, options)

    def example_inputs(self, inv: _Invocation, rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return random operands with one of the batches from `example_draws`."""
        draws = self.example_draws(inv, rng)
        return draws[str(rng.choice(list(draws)))]

    def example_draws(
        self, inv: _Invocation, rng: np.random.Generator
    ) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the same random queries and cache with each kind of batch that a server meets, or has recorded."""
        args, kwargs = super().example_inputs(inv, rng)
        given, call = Operands(*args), self.call_of(inv)
        table = rng.permutation(call.table[0] * call.table[1]).reshape(call.table) % max(call.pages[0], 1)
        given = given._replace(page_table=jnp.asarray(table, jnp.int32))
        step = 0.02 if call.cache_dtype == "int8" else 1.0
        scales = [
            None if scale is None else jnp.asarray(rng.uniform(step / 2, 2 * step, scale.shape), jnp.float32)
            for scale in (given.k_scale, given.v_scale)
        ]
        given = given._replace(k_scale=scales[0], v_scale=scales[1])
        if call.cache_dtype == "int8":
            given = given._replace(kv_pages=jnp.asarray(rng.integers(-127, 128, call.pages), jnp.int8))
        batches = measured_batches(call.q[0], call.table[0], call.table[1] * call.pages[1], rng)
        return {name: (tuple(_with_batch(call, given, batch)), kwargs) for name, batch in batches.items()}

    def sharding_rule(self, inv: _Invocation) -> ShardingRule:
        """Return a rule that shards the heads, of queries and cache alike; a single KV head is replicated.

        Sequences are not sharded, because each device would need a separate cache with the pages of its sequences.
        """
        given = Operands(*inv.args)
        kv_heads = "_" if given.kv_pages.shape[2] == 1 else "kv_heads"
        texts = [f"_ heads _, _ _ {kv_heads} _ _, _ _, _, _"]
        texts += ["heads"] * (given.sinks is not None)
        texts += [kv_heads] * (given.k_scale is not None) + [kv_heads] * (given.v_scale is not None)
        texts += [" ".join("_" * len(x.shape)) for x in given.plan or ()]
        lse = ", _ heads" * inv.kwargs.get("return_lse", False)
        follows = {} if kv_heads == "_" else {"kv_heads": "heads"}
        return ShardingRule(f"{', '.join(texts)} -> _ heads _{lse}", split="heads", follows=follows)

    def cost(self, inv: _Invocation) -> Cost | None:
        """Return the work of sequences as long as the page table, because lengths are values.

        The tokens of a sequence count as the last ones of equally many; the cache is read as far as they see it.
        """
        call = self.call_of(inv)
        (tokens, heads, head_dim), (sequences, columns) = call.q, call.table
        pages, page_size, kv_heads, kinds, _ = call.pages
        if not is_known(*call.q, *call.pages, *call.table) or not sequences:
            return None
        window = columns * page_size if call.window is None else call.window + 1
        new = tokens / sequences
        keys = min(columns * page_size - (new - 1) / 2, window)
        item, cached = jnp.dtype(call.dtype).itemsize, jnp.dtype(call.cache_dtype).itemsize
        read = min(sequences * min(columns * page_size, window + new - 1), pages * page_size)
        return Cost(
            flops=2 * tokens * heads * keys * (head_dim + call.out_dim),
            bytes=tokens * heads * (head_dim + call.out_dim) * item + read * kv_heads * kinds * head_dim * cached,
        )

    def typical_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return 16 sequences in decode."""
        like: Any = jax.ShapeDtypeStruct
        args = (
            like((16, 16, 128), jnp.bfloat16),
            like((1024, 16, 4, 2, 128), jnp.bfloat16),
            *(like(shape, jnp.int32) for shape in ((16, 64), (17,), (16,))),
        )
        return args, {}


def _with_batch(call: PagedCall, given: Operands, batch: Batch) -> Operands:
    offsets, lengths = (jnp.asarray(x, jnp.int32) for x in batch)
    plan = None
    if given.plan is not None:
        plan = tuple(plan_arrays(call.planned_shape, given.page_table, offsets, lengths))
    return given._replace(query_offsets=offsets, kv_lengths=lengths, plan=plan)  # type: ignore[arg-type]


paged_attention = PagedAttention()
