# SPDX-License-Identifier: Apache-2.0
"""Calls rebuilt from their descriptions: the same node and the same key, or a reason."""

from __future__ import annotations

import copy
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.arrays import ones
from tests.ops.sample_kernels import Plain, WithResiduals, WithRule

from ejkernel import ops
from ejkernel.modules import flash_attention, rms_norm
from ejkernel.ops import DescriptionError, Invocation, Kernel, nameable, recording, tune
from ejkernel.ops.core.description import rebuild

KERNELS = [Plain("rebuilt.plain"), WithRule("rebuilt.with_rule"), WithResiduals("rebuilt.residuals")]
X, W, XS = ones((4, 4)), ones((4, 4)), ones((3, 4, 4))


class Anything(Kernel[int, jax.Array]):
    """Takes every static argument, by position and by keyword."""

    version = "2"

    def run(self, x, *statics, cfg, **options):
        return x * 2

    def heuristic_cfg(self, inv):
        return 0


ANYTHING = Anything("anything")


@nameable
def doubled(x):
    return 2 * x


@tune(space={"rows": [1, 2]})
def tuned(x, *, activation, rows=1):
    return activation(x)


def squared(f):
    return lambda *arrays: (f(*arrays) ** 2).sum()


def over_first(f):
    return jax.vmap(f, (0, None))


PROGRAMS = {
    "forward": (lambda f: f, X, W),
    "gradient": (lambda f: jax.grad(squared(f), (0, 1)), X, W),
    "gradient of one argument": (lambda f: jax.grad(squared(f), 1), X, W),
    "forward mode": (lambda f: lambda x, w: jax.jvp(f, (x, w), (x, w)), X, W),
    "vmap": (over_first, XS, W),
    "nested vmap": (lambda f: jax.vmap(jax.vmap(f, (None, 1), 1), (0, None)), XS, W),
    "named vmap": (lambda f: jax.vmap(f, (0, None), axis_name="batch"), XS, W),
    "vmap of gradient": (lambda f: over_first(jax.grad(squared(f), (0, 1))), XS, W),
    "gradient of vmap": (lambda f: jax.grad(squared(over_first(f)), (0, 1)), XS, W),
    "gradient of nested vmap": (lambda f: jax.grad(squared(over_first(jax.vmap(f, (None, 0)))), (0, 1)), XS, XS),
    "vmap of gradient of vmap": (lambda f: over_first(jax.grad(squared(jax.vmap(f, (None, 0))), (0, 1))), XS, XS),
    "jacfwd": (jax.jacfwd, X, W),
    "jacrev": (jax.jacrev, X, W),
    "hessian": (lambda f: jax.hessian(squared(f)), X, W),
    "gradient of gradient": (lambda f: jax.grad(squared(jax.grad(squared(f)))), X, W),
    "jacrev of jacrev": (lambda f: jax.jacrev(jax.jacrev(squared(f))), X, W),
    "vmap of hessian": (lambda f: over_first(jax.hessian(squared(f))), XS, W),
}


def calls(function, *arrays, **statics):
    """Return the calls of a program, without running it."""
    with recording() as seen:
        jax.jit(functools.partial(function, **statics)).lower(*arrays)
    return seen


def data_of(inv):
    """Return a call's description as another process reads it."""
    return json.loads(json.dumps(inv.description))


def types_of(inv):
    return [(like.shape, like.dtype) for like in inv.array_types]


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_call_of_a_program_is_rebuilt_as_it_was(kernel, program):
    transform, *arrays = PROGRAMS[program]
    seen = calls(transform(kernel), *arrays)
    assert seen
    for inv in seen:
        got = rebuild(data_of(inv))
        assert (got.key, got.node, types_of(got)) == (inv.key, inv.node, types_of(inv))
        assert (got.batch_axes, got.batch_sizes, got.direction) == (inv.batch_axes, inv.batch_sizes, inv.direction)


@pytest.mark.parametrize("precision", [None, "highest", "bfloat16"])
@pytest.mark.parametrize("x64", [False, True])
def test_precision_and_x64_are_the_programs_own(precision, x64):
    with jax.default_matmul_precision(precision), jax.enable_x64(x64):
        seen = calls(jax.grad(squared(KERNELS[0])), np.ones((4, 4)), np.ones((4, 4)))
    for inv in seen:
        got = rebuild(data_of(inv))
        assert (got.key, got.precision, got.x64) == (inv.key, precision, x64)
        assert types_of(got) == types_of(inv)


def test_weak_types_stay_weak():
    (inv,) = calls(ANYTHING, 1.0)
    got = rebuild(data_of(inv))
    assert inv.args[0].weak_type
    assert got.args[0].weak_type
    assert got.key == inv.key


def test_a_call_of_a_kernel_without_init_is_rebuilt():
    class Bare(Plain):
        def __init__(self):
            pass

    kernel = Bare()
    inv = Invocation(kernel=kernel, args=(X, W))
    assert rebuild(data_of(inv)).kernel is kernel


def test_the_latest_kernel_of_a_name_is_taken():
    kernels = [Plain("twice"), Plain("twice")]
    inv = Invocation(kernel=kernels[0], args=(X, W))
    assert rebuild(data_of(inv)).kernel is kernels[1]


@pytest.mark.slow
def test_the_modules_operations_are_rebuilt():
    q = jnp.ones((1, 16, 2, 8))
    loss = lambda q, w: flash_attention(rms_norm(q, w), q, q, causal=True).sum()  # noqa: E731
    seen = calls(jax.grad(loss, (0, 1)), q, jnp.ones(8))
    assert {inv.direction for inv in seen} == {"fwd", "bwd"}
    assert [rebuild(data_of(inv)).key for inv in seen] == [inv.key for inv in seen]


@pytest.mark.slow
@pytest.mark.parametrize("length", [16, 100])
@pytest.mark.parametrize("varying", [True, False])
def test_of_kernels_of_one_name_one_that_makes_such_a_call_is_taken(length, varying):
    q = jnp.ones((1, length, 2, 8))
    (inv,) = calls(lambda q: flash_attention(q, q, q, bucket_lengths=varying), q)
    got = rebuild(data_of(inv))
    assert got.key == inv.key
    assert types_of(got.representative) == types_of(got)


def test_a_tuned_function_is_rebuilt_with_nameable_functions():
    (inv,) = calls(lambda x: tuned(x, activation=doubled), X)
    got = rebuild(data_of(inv))
    assert (got.key, got.description) == (inv.key, inv.description)
    assert got.args[0].shape == inv.args[0].shape
    assert got.kwargs["activation"] is doubled


@pytest.mark.slow
def test_a_rebuilt_call_is_tuned_as_the_original():
    seen = calls(jax.grad(squared(over_first(KERNELS[2]))), XS, W)
    for inv in seen:
        tuned = ops.Autotuner(rounds=1, warmup=1).tune(rebuild(data_of(inv)), KERNELS[2])
        assert tuned.config == 0


def test_a_description_without_steps_has_no_wiring():
    for inv in calls(jax.grad(squared(over_first(KERNELS[0]))), XS, W):
        assert "wiring" not in inv.description


# --- refused descriptions ---


@pytest.fixture
def described():
    """The description of the gradient of a batched call."""
    seen = calls(over_first(jax.grad(squared(KERNELS[2]), (0, 1))), XS, W)
    return data_of(next(inv for inv in seen if inv.direction == "bwd"))


def changed(data, **changes):
    return copy.deepcopy(data) | changes


def test_the_untouched_description_is_fine(described):
    assert rebuild(described).op_id_v == "rebuilt.residuals.bwd@v0"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"surprise": 1}, "it needs op, args and kwargs"),
        ({"op": 3}, "its op is int 3"),
        ({"op": "absent@v0"}, "there is no kernel 'absent@v0' here; name the module that creates it"),
        ({"op": "rebuilt.residuals.bwd@v7"}, "no kernel 'rebuilt.residuals@v7' here, only rebuilt.residuals@v0"),
        ({"op": "rebuilt.residuals@v0"}, "there is no kernel"),
        ({"op": "rebuilt.plain.bwd@v0"}, "another key|do not fit"),
        ({"args": {}}, "its args is dict"),
        ({"args": [{"array": ["float32", [4, 4]]}]}, "cannot be traced|another key"),
        ({"steps": [["scan", 3], ["vmap", 3, [0, None]]]}, "there is no step list"),
        ({"steps": [["vjp", [True]], ["vmap", 3, [0, None]]]}, "one flag for each of 2 arrays"),
        ({"steps": [["vjp", [1, 1]], ["vmap", 3, [0, None]]]}, "one flag for each of 2 arrays"),
        ({"steps": [["vjp", [True, True]]] * 40}, "40 steps .at most 16"),
        ({"steps": [["vjp", [True, True]]] * 9, "wiring": [{}] * 9}, "a derivative of order 9 .at most 4"),
        ({"steps": [["vjp", [True, True]], ["vmap", -3, [0, None]]]}, "no vmap of size int -3"),
        ({"steps": [["vjp", [True, True]], ["vmap", 4, [0, None]]]}, "cannot be traced|another key"),
        ({"wiring": [{}, {}]}, "axes None do not fit 5 arrays|axes None"),
        ({"wiring": [{}, {"axes": [0, 0, 0, None, 99]}]}, "do not fit 5 arrays"),
        ({"wiring": [{}, {"axes": [0, 0, 0, None, 0], "run": "me"}]}, "there is no wiring"),
        ({"wiring": [{"residuals": True}, {"axes": [0, None, 0, 0]}]}, "another key|cannot be traced"),
        ({"x64": 1}, "its x64 is int 1"),
        ({"precision": "perfect"}, "cannot be traced"),
        ({"method": "nonsense"}, "there is no method 'nonsense'"),
    ],
)
def test_a_changed_description_is_refused_with_a_reason(described, changes, reason):
    right = "0123456789abcdef"
    with pytest.raises(DescriptionError, match=reason):
        rebuild(changed(described, **changes), key=right)


@pytest.mark.parametrize("data", [None, 3, "text", [], {}, {"op": "rebuilt.plain@v0"}, {1: 2}])
def test_an_invalid_description_is_refused(data):
    with pytest.raises(DescriptionError, match="it needs op, args and kwargs"):
        rebuild(data)


def test_a_description_under_anothers_label_is_refused(described):
    with pytest.raises(DescriptionError, match=r"it describes a call of str 'rebuilt\.residuals\.bwd@v0'"):
        rebuild(described, op="rebuilt.plain@v0")
    with pytest.raises(DescriptionError, match="has another key"):
        rebuild(described, key="0" * 16)


def test_a_kernel_that_fails_while_it_is_traced_is_a_reason():
    class Fails(Plain):
        def run(self, x, w, *, cfg):
            raise RuntimeError("not today")

    kernel = Fails("fails")
    data = data_of(Invocation(kernel=kernel, args=(X, W)))
    data = changed(data, op="fails.bwd@v0", steps=[["vjp", [True, True]]])
    with pytest.raises(DescriptionError, match="RuntimeError: not today"):
        rebuild(data)
