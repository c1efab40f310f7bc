# SPDX-License-Identifier: Apache-2.0
"""What every implementation of every operation is held to. An operation joins with a file `<operation>_cases.py`.

That file has a `SUBJECT`: the operation, calls of it, how exact results must be, and a `Backend` for each of its
implementations; see `test_conformance.py` for what is done with them.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops import Operation, device_fingerprint, device_kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """How one implementation is tested.

    Attributes:
        dtypes: Of arrays; with the first all calls are tested, with the others those that the subject says.
        params: Of the forward and of the backward, where all calls are tested; its heuristic's by default.
        simulate: Makes it run on a CPU: has monkeypatch put stand-ins or an interpreter in the place of a device.
    """

    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    params: tuple[Any, Any] = (None, None)
    simulate: Callable[[Any], None] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """How one operation is tested.

    Attributes:
        operation: The operation.
        calls: By name, a function from a dtype to positional arguments and options; small ones.
        backends: One for each implementation, by name.
        tolerance: By dtype, how far a result may be off, as a part of the largest; a gradient may be twice that.
        briefly: Names of calls that are enough for further dtypes, programs and transformations.
        in_float16: Names of calls that are tested in float16, too: values overflow unless they are scaled first.
        spaces: By name, as `calls`, the shapes of calls as they are in use: their whole spaces are lowered.
        check_residuals: Compares what a forward left with what it should: `(arguments, options, residuals, dtype)`.
        splits: Whether parts of the first axis are calls of their own; else every device is given the whole.
    """

    operation: Operation
    calls: Mapping[str, Callable[[str], tuple[tuple[Any, ...], dict[str, Any]]]]
    backends: Mapping[str, Backend]
    tolerance: Mapping[str, float]
    briefly: tuple[str, ...]
    spaces: Mapping[str, Callable[[str], tuple[tuple[Any, ...], dict[str, Any]]]]
    check_residuals: Callable[[Any, Any, Any, str], None] | None = None
    splits: bool = True
    in_float16: tuple[str, ...] = ()

    def prepared(self, name, dtype):
        """Return the arguments and options of a call as implementations see them."""
        args, options = (self.calls | self.spaces)[name](dtype)
        return self.operation.prepare(*args, **options)


def subjects():
    """Return the subjects of all files beside this one, by their operations' names."""
    files = sorted(Path(__file__).parent.glob("*_cases.py"))
    found = [importlib.import_module(f"{__package__}.{file.stem}").SUBJECT for file in files]
    return {subject.operation.name: subject for subject in found}


def described(subject, args, options, *, backward=False, here=True):
    """Return the description of a call on this process's device, or on one that is not known yet."""
    rest = {name: value for name, value in options.items() if name != "implementation"}
    place = {"platform": device_kind(), "device_fingerprint": device_fingerprint()} if here else {}
    return dataclasses.replace(subject.operation.describe(*args, **rest), backward=backward, **place)


def compiled(function, *args):
    """Return the compiled function; on a CPU, where tests spend their time compiling, without optimizing."""
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
    return jax.jit(function).lower(*args).compile(compiler_options=options)


def compute(function, *args):
    return compiled(function, *args)(*args)


def is_inexact(leaf):
    return leaf is not None and jnp.issubdtype(leaf.dtype, jnp.inexact)


def split(args, which=is_inexact):
    """Return the arrays of positional arguments that have gradients, or others, and what puts such in their places."""
    leaves, tree = jax.tree.flatten(args)

    def joined(arrays):
        given = iter(arrays)
        return jax.tree.unflatten(tree, [next(given) if which(leaf) else leaf for leaf in leaves])

    return [leaf for leaf in leaves if which(leaf)], joined


_references = {}  # programs of calls, each for all implementations and dtypes


def by_reference(subject, name, args, options, dtype):
    """Return output, cotangents that are `cos(out)` with the output rounded to `dtype`, and gradients, in float32."""
    arrays, joined = split(args)
    wide = [array.astype(jnp.promote_types(array.dtype, jnp.float32)) for array in arrays]

    def forward(*wide):
        return subject.operation.reference(*joined(wide), **options)

    def run(cotangents, *wide):
        out, pull = jax.vjp(forward, *wide)
        return out, list(pull(cotangents))

    known = (subject.operation.name, name, *(array.dtype for array in wide))
    if known not in _references:
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(forward, *wide))
        _references[known] = compiled(run, zeros, *wide), zeros
    program, zeros = _references[known]
    out, _ = program(zeros, *wide)
    cotangents = jax.tree.map(lambda x: jnp.cos(x.astype(dtype)), out)
    out, gradients = program(jax.tree.map(lambda x, like: x.astype(like.dtype), cotangents, out), *wide)
    return out, cotangents, gradients


def by_implementation(found, successor, calls, params, joined):
    """Return a function from floating-point arrays, and cotangents, to output, residuals and gradients.

    Without cotangents they are `cos(out)`, which is not for what is compared with the reference: where the output is
    large, a last digit that is rounded the other way makes another cosine.

    Args:
        found: Whose forward runs.
        successor: Whose backward follows.
        calls: The call's descriptions, forward and backward.
        params: Of both; `None`: the heuristic's.
        joined: Puts the arrays in their places among the arguments.
    """
    call, backward_call = calls
    fwd = found.heuristic(call) if params[0] is None else params[0]
    bwd = successor.heuristic(backward_call) if params[1] is None else params[1]

    def run(arrays, cotangents=None):
        args = joined(arrays)
        out, residuals = found.forward(call, *args, params=fwd)
        cotangents = tuple(jax.tree.leaves(jax.tree.map(jnp.cos, out) if cotangents is None else cotangents))
        gradients = successor.backward(backward_call, residuals, out, cotangents, *args, params=bwd)
        return out, residuals, [g for g in jax.tree.leaves(gradients) if is_inexact(g)]

    return run


def assert_close(subject, expected, actual, dtype, allow=1):
    """Compare arrays, or several, with a tolerance that is relative to the largest value."""

    def compare(expected, actual):
        expected, actual = np.asarray(expected, np.float64), np.asarray(actual, np.float64)
        atol = allow * subject.tolerance[dtype] * max(1.0, np.abs(expected).max(initial=0))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)

    jax.tree.map(compare, expected, actual)
