# SPDX-License-Identifier: Apache-2.0
"""How often a program makes each of its calls."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel.cli import report
from ejkernel.ops import Kernel, tune
from ejkernel.ops.execution.discovery import discover, discover_counted

X = jax.ShapeDtypeStruct((4, 4), jnp.float32)


@tune(space={"n": [1, 2]})
def counted(x, *, n=1):
    return jnp.sin(x)


@tune(space={"n": [1, 2]})
def other(x, *, n=1):
    return jnp.cos(x)


def numbers(function, *args):
    """Return the numbers of the calls, by operation and shape."""
    calls, times = discover_counted(function, args, {})
    assert [inv.key for inv in calls] == [inv.key for inv in discover(function, *args)]
    return {
        (inv.op_id + " (vmap)" * bool(inv.batch_sizes), inv.array_types[0].shape): times.get(inv.key) for inv in calls
    }


def test_a_call_in_a_scan_counts_for_each_step_also_in_the_gradient():
    def loss(x):
        body = jax.checkpoint(lambda x, _: (counted(counted(x)), None))
        x, _ = jax.lax.scan(body, x, length=32)
        return other(x).sum()

    found = numbers(jax.grad(loss), X)
    shape = X.shape
    # The gradient computes each call again.
    assert found["counted", shape] >= 64
    assert found["counted.bwd", shape] == 64
    assert found["other.bwd", shape] == 1


def test_nested_functions_batches_and_loops_count():
    @jax.jit
    def inner(x):
        return counted(x)

    def program(x):
        y = inner(inner(x)) + jax.vmap(counted)(x)[0]
        y, _ = jax.lax.scan(lambda y, _: (jax.lax.fori_loop(0, 3, lambda _, y: other(y), y), None), y, length=5)
        return jax.lax.while_loop(lambda y: y.sum() > 0, counted, y)

    found = numbers(program, X)
    # `vmap` makes another call, of the batch; and a `while_loop` counts as one step.
    assert sorted(found.items()) == [(("counted", (4, 4)), 3), (("counted (vmap)", (4, 4)), 1), (("other", (4, 4)), 15)]


def test_of_a_condition_the_branch_with_the_most_calls_counts():
    def program(x):
        return jax.lax.cond(x.sum() > 0, lambda x: counted(counted(x)), lambda x: other(counted(x)), x)

    assert numbers(program, X) == {("counted", X.shape): 2, ("other", X.shape): 1}


def test_a_program_that_another_library_wraps_is_counted_too():
    class Wrapped:
        """As in Flax NNX, whose `trace` returns an object around JAX's."""

        def __call__(self, x): ...

        def trace(self, x):
            self.traced = jax.jit(lambda x: counted(counted(x))).trace(x)
            return self

        def lower(self):
            return self.traced.lower()

    calls, times = discover_counted(Wrapped(), [X], {})
    assert [times[inv.key] for inv in calls] == [2]


class WithRule(Kernel[int, jax.Array]):
    """Its forward calls another kernel, and its gradient rule two."""

    def run(self, x, *, cfg):
        return counted(x)

    def candidate_cfgs(self, inv):
        return [1, 2]

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return (other(other(cotangents[0])),)


def test_calls_inside_kernels_and_their_gradient_rules_count():
    kernel = WithRule("with_rule")

    def loss(x):
        return jax.lax.scan(lambda x, _: (kernel(x), None), x, length=5)[0].sum()

    found = numbers(jax.grad(loss), X)
    shape = X.shape
    assert found == {
        ("with_rule", shape): 5,
        ("with_rule.bwd", shape): 5,
        ("counted", shape): 5,
        ("other", shape): 10,
    }


def test_a_run_makes_at_least_the_calls_that_are_known():
    calls, times = discover_counted(lambda x: counted(counted(other(x))), [X], {})
    assert "made 3 times in a run" in report.found("train", calls, "cpu:x", times)
    unknown = {key: number for key, number in times.items() if key.op.startswith("counted")}
    assert "made at least 3 times in a run" in report.found("train", calls, "cpu:x", unknown)
