# SPDX-License-Identifier: Apache-2.0
"""Attention of short sequences: teams of one or two consumer warpgroups, each computing one bundle after another.

A bundle is one head, or several short heads of one example. These share a matrix of scores, and a mask hides the keys
of the others. NaN and infinity may reach other heads of the same example, but no other example.

The keys of a head fit into one matrix of scores. So the softmax needs one pass, and the gradients need neither the
output nor the log-sum-exp: maximum and sum of each row are computed again, and the row sums of output times cotangent
are those of weights times their gradients. Copies of the next heads overlap with the products of these. Only the
gradient of a shared bias is a sum over blocks of threads: each block has one bundle, and its consumers add up the
gradients of their examples in registers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._hopper.backend import Backend
from ejkernel.kernels._hopper.device import quotient, remainder, wrapped
from ejkernel.kernels._hopper.launch import PROGRAM, WARPGROUP, dispatch_warpgroup, launch, plgpu, tiled
from ejkernel.kernels._hopper.pipeline import Pipeline, producer_tail
from ejkernel.kernels._numbers import LOG2_E, LOWEST, power_of_two
from ejkernel.kernels.flash_attention.common import EMPTY_ROW_LSE

from .alone_single import convert, exponent, largest_of_rows, undone
from .alone_support import AlonePlan
from .alone_types import LARGEST_OF_BASE_2, AloneInputs, Item, Memory, Part, Weights, in_base_2
from .forward_mainloop import along_rows
from .masks import WGMMA, broadcast_index, within_window, zeros
from .matrices import Matrices
from .plan import REGISTERS, ROWS


class _AloneKernel:
    """The common part of forward and backward: launch, producer, and the weights of a head."""

    name: str

    def __init__(self, plan: AlonePlan, backend: Backend) -> None:
        self.plan, self.backend = plan, backend
        self.matrices, self.square = Matrices(backend, pieced=True), (ROWS, plan.columns)

    def run(self, inputs: AloneInputs) -> list[jax.Array]:
        """Return the results."""
        return launch(
            self._block,
            inputs,
            self.out_types(inputs),
            name=self.name,
            programs=self.plan.programs,
            memory=self._memory_types(),
            consumers=self.plan.consumers,
            reduces_rows_only=True,
            interpret=self.backend.interpret,
        )

    def out_types(self, inputs: AloneInputs) -> list[jax.ShapeDtypeStruct]:
        """Return the types of the results."""
        raise NotImplementedError

    def compute(self, part: Part, sums: Any) -> Any:
        """Compute a consumer's part of a head, start storing its results, and release the stage.

        Returns:
            `sums`, with what this head adds.
        """
        raise NotImplementedError

    def first_sums(self) -> Any:
        """Return the sums over all heads of a consumer, before the first."""
        return ()

    def store_sums(self, sums: Any, team: Any) -> None:
        """Store these sums after the last head."""

    def _memory_types(self) -> Memory:
        plan, buffers = self.plan, self.plan.buffers
        types: dict[str, Any] = {}
        for name, buffer in buffers.items():
            dtype = jnp.float32 if buffer.itemsize > 2 else plan.dtype
            if name == "largest":
                types[name] = plgpu.SMEM(buffer.shape, dtype)
            elif name in ("weights", "dscores"):
                types[name] = tiled(buffer.shape, dtype, buffer.swizzle)
            else:
                types[name] = self.matrices.type(buffer, dtype)
        copies = sum(self.pieces(self.staged(name)) * plan.heads_of(name) for name, _ in self._slabs())
        # Teams share no stage: each must wait for every copy into its stages.
        types["pipeline"] = Pipeline.types(plan.teams * plan.stages, consumers=plan.team, copies=copies)
        if plan.team > 1 and (plan.backward or plan.single):
            for name in ("shared", "done"):
                types[name] = plgpu.Barrier(num_arrivals=plan.team, num_barriers=plan.teams)
        return Memory._make(types.get(name) for name in Memory._fields)

    def _slabs(self) -> list[tuple[str, int]]:
        """Return the name and the slab of each copy to shared memory."""
        return [(name, slab) for name in self.plan.operands for slab in range(self.plan.slabs(name))]

    def staged(self, name: str) -> str:
        """Return the name of the buffer that copies of an operand fill, and that its gradient leaves through."""
        return f"staged_{name}" if self.plan.single else name

    def _block(self, inputs: AloneInputs, outputs: Any, memory: Memory) -> None:
        self.inputs, self.outputs, self.memory = inputs, outputs, memory
        plan, program, consumers = self.plan, lax.axis_index(PROGRAM), self.plan.consumers
        if plan.keeps_heads:
            count = quotient(plan.batch - 1 - quotient(program, plan.bundles), plan.programs // plan.bundles) + 1
        else:
            count = quotient(plan.items - 1 - program, plan.programs) + 1
        dispatch_warpgroup(
            lax.axis_index(WARPGROUP),
            consumers,
            REGISTERS[consumers],
            producer=lambda: self._produce(count),
            consumer=lambda warpgroup: self._consume(warpgroup, count),
        )

    def _item(self, number: Any) -> Item:
        plan = self.plan
        place = number * plan.programs + lax.axis_index(PROGRAM)  # `keeps_heads`: always the same bundle
        stage = self.memory.pipeline.stage(number)
        return Item(quotient(place, plan.bundles), remainder(place, plan.bundles), stage)

    def _heads(self, name: str, item: Item, slab: Any, rows: int) -> list[tuple[Any, Any, Any]]:
        """Return head, rows in its array, and rows in shared memory for each copy to or from a slab.

        Copies leave out rows past the end of the array. Key heads count once for all heads of a bundle that share one.
        """
        # Computed, because Pallas refuses constants out of bounds.
        start = lax.add(np.int32(slab * ROWS), np.int32(0)) if isinstance(slab, int) else slab * ROWS
        heads = self.plan.heads_of(name)
        size = rows // heads
        return [(item.bundle * heads + n, pl.ds(start, size), pl.ds(n * size, size)) for n in range(heads)]

    def store(self, name: str, buffer: Any, at: tuple[Any, ...], value: jax.Array, output: int, part: Part) -> None:
        """Start storing a consumer's rows of an array through a buffer that no product needs any more."""
        target = self.outputs[output]
        self.matrices.assign(buffer, at, value.astype(target.dtype))
        plgpu.commit_smem()
        for head, rows, own in self._heads(name, part.item, part.slab, self.plan.rows(name)):
            self.matrices.copy_out(buffer, (*at, own), target, (part.item.example, rows, head))

    def _produce(self, count: Any) -> None:
        pipeline = self.memory.pipeline
        bundles_of_group = self.plan.heads // self.plan.groups // self.plan.sharing

        @pl.loop(0, count)
        def _copy(number: Any) -> None:
            item = self._item(number)
            pipeline.producer_wait(number, item.stage)
            for name, slab in self._slabs():
                # Consumers convert whole slabs, so that none of their rows may have any values.
                size = ROWS if self.plan.single else self.plan.rows(name)
                source, buffer = getattr(self.inputs, name), getattr(self.memory, self.staged(name))
                for head, rows, own in self._heads(name, item, slab, size):
                    group = quotient(head, bundles_of_group) if name in ("key", "value") else head
                    at, full = (item.stage, slab, own), pipeline.full.at[item.stage]
                    self.matrices.copy_in(source, (item.example, rows, group), buffer, at, full)

        producer_tail(count, pipeline)

    def _consume(self, warpgroup: Any, count: Any) -> None:
        plan, pipeline = self.plan, self.memory.pipeline
        team, slab = (
            (warpgroup, 0) if plan.team == 1 else (quotient(warpgroup, plan.team), remainder(warpgroup, plan.team))
        )

        def compute(turn: Any, sums: Any) -> Any:
            item = self._item(turn * plan.teams + team)
            pipeline.consumer_wait(item.stage)
            return self.compute(Part(item, team, slab, warpgroup), sums)

        turns = quotient(count + plan.teams - 1 - team, plan.teams)
        self.store_sums(lax.fori_loop(0, turns, compute, self.first_sums()), team)
        plgpu.wait_smem_to_gmem(0)

    def await_team(self, barrier: Any, part: Part) -> None:
        """Wait for the other consumer of a team of two."""
        if self.plan.team > 1:
            plgpu.barrier_arrive(barrier.at[part.team])
            plgpu.barrier_wait(barrier.at[part.team])

    def converted(self, part: Part) -> tuple[dict[str, jax.Array], Part]:
        """Convert float32; return the exponents of the operands' factors, and the work with their stage in float16."""
        if not self.plan.single:
            return {}, part
        return convert(self, part), part._replace(item=part.item._replace(stage=part.team))

    def read(self, sums: Any, pending: int, raised: dict[str, jax.Array], *operands: str) -> jax.Array:
        """Return products of operands, once at most `pending` are in flight."""
        found = self.backend.read(sums, pending=pending)
        return undone(found, *(raised[name] for name in operands)) if raised else found

    def tiles(self, name: str, part: Part, slab: Any, *rows: Any) -> list[Any]:
        """Return the pieces of a slab; called where they are used, so that no reference enters a loop of products."""
        return self.matrices.tiles(getattr(self.memory, name), part.item.stage, slab, *rows)

    def copied(self, name: str, part: Part, slab: Any) -> list[Any]:
        """Return the pieces of a slab's copied rows; its other rows may have any values."""
        return self.tiles(name, part, slab, pl.ds(0, self.plan.rows(name)))

    def pieces(self, name: str) -> int:
        """Return their number."""
        return self.matrices.count(self.plan.buffers[name])

    def multiply_with_keys(self, total: Any, rows: str, keys: str, part: Part) -> None:
        """Start the product of the consumer's rows of a matrix and all rows of one by keys."""
        size = self.plan.key_rows
        for slab in range(self.plan.key_slabs):
            columns = total if self.plan.key_slabs == 1 else total.at[:, slab * size : (slab + 1) * size]
            self.matrices.multiply_transposed(columns, self.tiles(rows, part, part.slab), self.copied(keys, part, slab))

    def multiply_by_keys(self, total: Any, left: jax.Array, keys: str, part: Part) -> None:
        """Start `total += left @ right`, where the rows of `right` are those of keys."""
        for slab, columns in enumerate(self.slabs_of(left)):
            self.matrices.multiply(total, columns, self.copied(keys, part, slab))

    def slabs_of(self, x: jax.Array) -> list[jax.Array]:
        """Return the columns of each slab of keys."""
        size = self.plan.key_rows
        return [x[:, i * size : (i + 1) * size] for i in range(self.plan.key_slabs)] if self.plan.key_slabs > 1 else [x]

    def terms(self, part: Part) -> tuple[jax.Array | None, jax.Array | None]:
        """Return the mask and the bias of a consumer's queries; called while products are in flight."""
        hidden, bias = self.inputs.hidden, self.inputs.bias

        def load(x: Any) -> jax.Array:
            at, columns = broadcast_index(x, part.item.example, part.item.bundle), pl.ds(0, self.plan.columns)
            if x.shape[2] > 1:
                rows = x.at[(*at, pl.ds(part.slab * ROWS, ROWS), columns)]
                whole: jax.Array = plgpu.load(rows, layout=WGMMA, optimized=False)
                return whole
            by_key = plgpu.load(x.at[(*at, 0, columns)], layout=WGMMA.reduce(0), optimized=False)
            return lax.broadcast_in_dim(by_key, self.square, [1])

        return None if hidden is None else load(hidden), None if bias is None else load(bias)

    def weights(self, part: Part, products: jax.Array, hidden: jax.Array | None, bias: jax.Array | None) -> Weights:
        """Return the weights, given the products of queries and keys, and the `terms`."""
        rules, slope = self.plan.rules, None
        if rules.soft_cap is None:
            logits = products * (rules.scale * LOG2_E)
        else:
            squashed = jnp.tanh(products * (rules.scale / rules.soft_cap))
            logits, slope = squashed * (rules.soft_cap * LOG2_E), 1 - squashed * squashed
        if bias is not None:
            logits = logits + bias
        for condition in self._visible(part):
            logits = jnp.where(condition, logits, -jnp.inf)
        if hidden is not None:
            logits = jnp.where(hidden < 0, -jnp.inf, logits)
        top = jnp.maximum(logits.max(axis=1), LOWEST)
        weights = jnp.exp2(logits - along_rows(top, self.square))
        total = weights.sum(axis=1)
        decay: Any = 1.0
        empty = total == 0.0
        if self.inputs.sinks is not None:
            at = broadcast_index(self.inputs.sinks, part.item.example, part.item.bundle)
            own = plgpu.load(self.inputs.sinks.at[at], layout=WGMMA.reduce(1), optimized=False)
            sink, is_none = jnp.maximum(in_base_2(own), LOWEST), own == -jnp.inf
            # Weights are rounded relative to the largest of them: float16 has no digits for those far below a sink.
            keys, top = top, jnp.maximum(top, sink)
            decay = jnp.exp2(keys - top)
            total, empty = total * decay + jnp.where(is_none, 0.0, jnp.exp2(sink - top)), empty & is_none
        # Maxima near the lowest float come from a bias or a sink that was not converted to base 2.
        highest = jnp.where(top < -LARGEST_OF_BASE_2, top, top * (1 / LOG2_E))
        lse = jnp.where(empty, EMPTY_ROW_LSE, highest + jnp.log2(total) * (1 / LOG2_E))
        return Weights(weights, jnp.where(empty, 0.0, decay / total), lse, slope)

    def _visible(self, part: Part) -> list[jax.Array]:
        """Return the conditions under which queries see keys."""
        plan = self.plan
        row, column = (plgpu.broadcasted_iota(jnp.int32, self.square, axis, layout=WGMMA) for axis in (0, 1))
        apart, first = [], part.slab * ROWS + (plan.keys - plan.queries)
        if plan.together > 1:
            if plan.key_heads > 1:
                apart = [quotient(row, plan.tokens * plan.sharing) == quotient(column, plan.key_tokens)]
            row, column = wrapped(row, plan.tokens), wrapped(column, plan.key_tokens)
        conditions = apart + within_window(plan.rules, row + first, column)
        if plan.key_lengths:
            # The maximum gives the length the type of values computed here, on any mesh axis that it varies over.
            conditions.append(column < jnp.maximum(self.inputs.key_lengths[part.item.example], 0))
        elif plan.keys < plan.key_slabs * plan.key_tokens:
            conditions.append(column < plan.keys)
        return conditions


class ForwardKernel(_AloneKernel):
    """Outputs, and the log-sum-exp of whole slabs of queries."""

    name = "attention_forward_alone"

    def out_types(self, inputs: AloneInputs) -> list[jax.ShapeDtypeStruct]:
        """See `_AloneKernel`."""
        plan = self.plan
        return [
            jax.ShapeDtypeStruct((*inputs.query.shape[:3], inputs.value.shape[3]), inputs.query.dtype),
            jax.ShapeDtypeStruct((plan.batch, plan.bundles, plan.team * ROWS), jnp.float32),
        ]

    def compute(self, part: Part, sums: Any) -> Any:
        """See `_AloneKernel`."""
        plan, pipeline = self.plan, self.memory.pipeline
        raised, read = self.converted(part)
        if plan.single:
            pipeline.consumer_release(part.item.stage)

        def products(scores: Any) -> Any:
            self.multiply_with_keys(scores, "query", "key", read)
            terms = self.terms(part)
            return self.weights(part, self.read(scores, 0, raised, "query", "key"), *terms)

        found = self.backend.with_accumulators(products, self.square)
        # Rounded before the product starts, which reads the registers.
        left = found.weights.astype(plan.dtype)
        (out,) = self.backend.accumulate(
            lambda sums: self.multiply_by_keys(sums[0], left, "value", read), zeros((ROWS, plan.value_dim))
        )
        if not plan.single:
            pipeline.consumer_release(part.item.stage)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous output must have left the buffer
        out = out * along_rows(found.share, out.shape)
        out = undone(out, raised["value"]) if plan.single else out
        self.store("out", self.memory.out, (part.warpgroup,), out, 0, part)
        self.outputs[1].at[part.item.example, part.item.bundle, pl.ds(part.slab * ROWS, ROWS)][...] = found.lse
        return sums


class BackwardKernel(_AloneKernel):
    """Gradients of query, key and value, and of the rows and columns of a bias."""

    name = "attention_backward_alone"

    def out_types(self, inputs: AloneInputs) -> list[jax.ShapeDtypeStruct]:
        """See `_AloneKernel`; XLA adds up the gradients of keys and values of several bundles."""
        plan = self.plan
        types = [
            jax.ShapeDtypeStruct((*x.shape[:2], plan.bundles * plan.heads_of(name), x.shape[3]), x.dtype)
            for name, x in zip(plan.operands[:3], inputs[:3], strict=True)
        ]
        if inputs.bias is not None:
            terms = plan.programs // plan.bundles * plan.teams if plan.keeps_heads else plan.batch
            types.append(jax.ShapeDtypeStruct((terms, plan.bundles, plan.team * ROWS, plan.columns), jnp.float32))
        return types

    def first_sums(self) -> Any:
        """See `_AloneKernel`."""
        return zeros(self.square) if self.plan.keeps_heads else ()

    def store_sums(self, sums: Any, team: Any) -> None:
        """See `_AloneKernel`."""
        if self.plan.keeps_heads:
            program, bundles = lax.axis_index(PROGRAM), self.plan.bundles
            self._store_dbias(sums, quotient(program, bundles) * self.plan.teams + team, remainder(program, bundles), 0)

    def compute(self, part: Part, sums: Any) -> Any:
        """See `_AloneKernel`."""
        plan, memory, stage = self.plan, self.memory, part.item.stage
        raised, read = self.converted(part)
        factor = 2.0**-plan.raised
        if self.inputs.factor is not None:
            factor = factor * self.inputs.factor[part.item.example]
        weights, dscores, dlogits = self._scores_gradient(part, read, raised)
        if plan.keeps_heads:
            sums = sums + dlogits * factor
        elif self.inputs.bias is not None:
            self._store_dbias(dlogits * factor, part.item.example, part.item.bundle, part.slab)
        if plan.single:
            raised["dscores"] = exponent(self, part, len(plan.operands), largest_of_rows(dscores))
            dscores = dscores * along_rows(power_of_two(raised["dscores"]), self.square)
        dscores = dscores.astype(plan.dtype)
        for slab, (one, other) in enumerate(zip(self.slabs_of(weights), self.slabs_of(dscores), strict=True)):
            at = (part.team, slab, part.slab, slice(None), pl.ds(0, plan.key_rows))
            memory.weights.at[at][...] = one
            memory.dscores.at[at][...] = other
        plgpu.commit_smem()  # products read shared memory through another path
        self.await_team(memory.shared, part)
        (dvalue,) = self.backend.accumulate(
            lambda sums: self._multiply_by_queries(sums[0], memory.weights, "dout", read),
            zeros((ROWS, plan.value_dim)),
        )

        def store(name: str, gradient: jax.Array, *factors: str) -> None:
            gradient = undone(gradient, *(raised[name] for name in factors)) if raised else gradient
            buffer = getattr(memory, self.staged(name))
            self.store(name, buffer, (stage, part.slab), gradient, plan.operands.index(name), part)

        store("value", dvalue * factor, "dout")

        def products(sums: Any) -> None:
            self.multiply_by_keys(sums[0], dscores, "key", read)
            self._multiply_by_queries(sums[1], memory.dscores, "query", read)

        dquery, dkey = self.backend.accumulate(products, *(zeros((ROWS, plan.head_dim)),) * 2)
        self.await_team(memory.done, part)
        store("query", dquery * (factor * plan.rules.scale), "dscores", "key")
        store("key", dkey * (factor * plan.rules.scale), "dscores", "query")
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        memory.pipeline.consumer_release(stage)
        return sums

    def _store_dbias(self, dlogits: jax.Array, term: Any, bundle: Any, slab: Any) -> None:
        self.outputs[3].at[term, bundle, pl.ds(slab * ROWS, ROWS)][...] = dlogits

    def _scores_gradient(
        self, part: Part, read: Part, raised: dict[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the weights in the operands' dtype, and the gradients of the products and of the logits."""
        plan = self.plan

        def products(scores: Any, pulls: Any) -> Any:
            self.multiply_with_keys(scores, "query", "key", read)
            self.multiply_with_keys(pulls, "dout", "value", read)
            terms = self.terms(part)
            # The weights are computed while the second product is in flight.
            pending = plan.key_slabs * self.pieces("value")
            found = self.weights(part, self.read(scores, pending, raised, "query", "key"), *terms)
            weights = found.weights * along_rows(found.share * 2.0**plan.raised, self.square)
            return weights, self.read(pulls, 0, raised, "dout", "value"), found.slope

        weights, pulls, slope = self.backend.with_accumulators(products, self.square, self.square)
        delta = (weights * pulls).sum(axis=1) * 2.0**-plan.raised
        dlogits = weights * (pulls - along_rows(delta, self.square))
        dscores = dlogits if slope is None else dlogits * slope
        return weights.astype(plan.dtype), dscores, dlogits

    def _multiply_by_queries(self, total: Any, scores: Any, rows: str, part: Part) -> None:
        """Start the product of the transposed scores of the consumer's keys, and all rows of queries."""
        for slab in range(self.plan.team):
            left = scores.at[part.team, part.slab, slab, pl.ds(0, self.plan.rows(rows))].transpose((1, 0))
            self.matrices.multiply(total, left, self.copied(rows, part, slab))
