# SPDX-License-Identifier: Apache-2.0
"""Random arrays of given shapes and dtypes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import compat
from ejkernel.ops.utils.formatting import array_text
from ejkernel.ops.utils.values.signature import HasType, is_array

LARGE = 1 << 20  # arrays with more elements are generated on the device


def random_array(like: HasType, rng: np.random.Generator) -> jax.Array:
    """Return a random array of the shape and dtype of `like`; see `Kernel.example_inputs`."""
    if compat.tracing.dtypes.issubdtype(like.dtype, compat.tracing.dtypes.prng_key):
        first = jax.random.key(int(rng.integers(2**31)), impl=compat.tracing.key_implementation(like.dtype))
        keys = jax.random.split(first, max(1, int(np.prod(like.shape))))
        return keys[: int(np.prod(like.shape))].reshape(like.shape)
    if not jnp.issubdtype(like.dtype, jnp.inexact):
        return _placed(rng.integers(0, 2, like.shape).astype(like.dtype))
    if math.prod(like.shape) > LARGE:
        made: jax.Array = _normal(int(rng.integers(2**31)), like.shape, jnp.dtype(like.dtype))
        return made
    values = rng.standard_normal(like.shape, np.float32)
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        values = values + 1j * rng.standard_normal(like.shape, np.float32)
    return _placed(values.astype(like.dtype))


def drawn_integers(leaves: Iterable[Any]) -> str:
    """Return the types of the integer arrays for which `random_array` draws zeros and ones, e.g. `i32[2,8], i32[4]`."""
    found = [leaf for leaf in leaves if is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.integer)]
    return ", ".join(dict.fromkeys(array_text(leaf.dtype, leaf.shape) for leaf in found))


def _placed(values: Any) -> jax.Array:
    # Unlike `jnp.asarray`, this compiles no program for a new shape.
    placed: jax.Array = jax.device_put(values)
    return placed


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(seed: int, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> jax.Array:
    """Return normally distributed numbers generated on the device. Generating them on the host takes seconds."""
    # "rbg" is fast on devices and compiles quickly, unlike JAX's default generator
    return jax.random.normal(jax.random.key(seed, impl="rbg"), shape, dtype)


def random_inputs(tree: object, rng: np.random.Generator) -> Any:
    """Return `tree` with a random array in place of each array."""
    return jax.tree.map(lambda leaf: random_array(leaf, rng) if is_array(leaf) else leaf, tree)
