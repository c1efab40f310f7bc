# SPDX-License-Identifier: Apache-2.0
"""Our Hopper kernels as blocks of a sharded sequence, simulated: `vmap` stands for the devices."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from tests.kernels.attention_cases import Case, reference_with_gradients
from tests.kernels.flash_attention.test_mosaic_random import Simulated, assert_close, cotangent

from ejkernel import compat
from ejkernel.kernels.flash_attention import context
from ejkernel.kernels.flash_attention.common import Rules, describe, gradient_of_sinks, lse_of_keys, with_sinks
from ejkernel.modules import from_zigzag, to_zigzag

pytestmark = pytest.mark.slow

DEVICES = 2
WHOLE = pytest.mark.whole
CAUSAL = Rules(scale=0.3, right=0)


class EveryBranch:
    """`jax.lax` with a `switch` that runs all branches: the simulator has effects, which `vmap` permits in none."""

    def __getattr__(self, name):
        return getattr(jax.lax, name)

    def switch(self, index, branches, *args):
        found = [branch(*args) for branch in branches]
        return jax.tree.map(lambda *x: jnp.stack(x)[index], *found)


def blocks(rules):
    """Return the calls of a block, forward and backward."""
    kernels = Simulated()

    def params(operands, own, *, backward):
        call = describe(operands, own, platform="gpu", fingerprint="gpu:nvidia_h200")
        return kernels.heuristic(dataclasses.replace(call, backward=backward))

    def attend(operands, sides):
        own = dataclasses.replace(rules, left=sides[0], right=sides[1])
        found = params(operands, own, backward=False)
        # On two cores the simulation of three consumers does not finish.
        return kernels.attend(operands, own, dataclasses.replace(found, warpgroups=min(found.warpgroups, 2)))

    def pull(operands, sides, residuals, cotangents):
        own = dataclasses.replace(rules, left=sides[0], right=sides[1], partial=True)
        residuals = residuals[0], lse_of_keys(operands, residuals[1], own)
        return kernels.differentiate(operands, residuals, *cotangents, own, params(operands, own, backward=True))[:3]

    return {"attend": attend, "pull": pull}


def on_devices(rules, operands, dout, **options):
    """Return the output and the gradients of query, key, value and sinks."""
    call = context.Context(axes=("context",), sides=(rules.left, rules.right), **options, **blocks(rules))
    names = ("query", "key", "value", "query_segments", "key_segments")
    sharded = {name: x for name in names if (x := getattr(operands, name)) is not None} | {"dout": dout}

    def local(shards):
        own = operands._replace(**{name: x for name, x in shards.items() if name != "dout"}, sinks=None)
        out, lse = call.forward(own)
        out, lse = (out, lse) if operands.sinks is None else with_sinks(out, lse, operands.sinks)
        gradients = call.backward(own, (out, lse), (shards["dout"],))
        return [out, *gradients], gradient_of_sinks(operands.sinks, out, lse, (shards["dout"],))

    def run(arrays):
        arrays = to_zigzag(arrays, DEVICES) if options["zigzag"] else arrays
        cut = jax.tree.map(lambda x: jnp.stack(jnp.split(x, DEVICES, axis=1)), arrays)
        found, dsinks = jax.vmap(local, axis_name="context")(cut)
        found = [jnp.concatenate(x, axis=1) for x in found]
        found = from_zigzag(found, DEVICES) if options["zigzag"] else found
        return found if dsinks is None else [*found, dsinks.sum(axis=0)]

    return jax.jit(run)(sharded)


@pytest.mark.parametrize(
    ("order", "segments", "rules"),
    [
        ({"zigzag": False, "gather": False}, False, CAUSAL),
        pytest.param({"zigzag": True, "gather": False}, True, CAUSAL, marks=WHOLE),
        pytest.param({"zigzag": True, "gather": True}, False, CAUSAL, marks=WHOLE),
        pytest.param({"zigzag": False, "gather": True}, True, Rules(scale=0.3, soft_cap=2.0), marks=WHOLE),
    ],
    ids=["ring", "zig-zag", "gathered in zig-zag order", "gathered, full"],
)
def test_blocks_of_two_devices_give_output_and_gradients_of_the_whole(monkeypatch, order, segments, rules):
    if reason := compat.kernels.mosaic_gpu_reason():
        pytest.skip(reason)
    monkeypatch.setattr(context, "lax", EveryBranch())
    case = Case(queries=88, keys=88, head_dim=24, value_dim=24, segments=segments, rules=rules)
    operands = case.operands("bfloat16")._replace(
        query_lengths=jnp.array([88, 60], jnp.int32),
        key_lengths=jnp.array([31, 70], jnp.int32),
        sinks=jnp.array([0.5, -1.0, 2.0, 0.1], jnp.float32),
    )
    dout = cotangent(operands, 1)
    (wanted, _), gradients = reference_with_gradients(operands, rules, dout, ("query", "key", "value", "sinks"))
    expected = (wanted, *gradients)
    found = on_devices(rules, operands, dout, **order)
    for name, ours, theirs in zip(("output", "query", "key", "value", "sinks"), found, expected, strict=True):
        assert_close(name, ours, theirs)
