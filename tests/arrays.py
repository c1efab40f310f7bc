# SPDX-License-Identifier: Apache-2.0
"""Arrays of tests, made without a program."""

from __future__ import annotations

import jax
import numpy as np


def on_device(values, dtype):
    """Return an array for `jax.jit`; `jnp.asarray` compiles a program for each shape and dtype that it converts."""
    return jax.device_put(np.asarray(values).astype(dtype))


def ones(shape, dtype="float32"):
    """Return an array of ones for `jax.jit`."""
    return on_device(np.ones(shape), dtype)


def zeros(shape, dtype="float32"):
    """Return an array of zeros for `jax.jit`."""
    return on_device(np.zeros(shape), dtype)
