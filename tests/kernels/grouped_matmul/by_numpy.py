# SPDX-License-Identifier: Apache-2.0
"""Grouped products by NumPy, and sizes of groups that a kernel could stumble over."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from tests.arrays import on_device

ROWS = 300
HOSTILE = {
    "uneven": (100, 0, 1, 128),
    "all in one": (0, 0, ROWS, 0),
    "single rows": (1, 1, 1, 1),
    "mostly empty": (0, 0, 0, 127),
    "none": (0, 0, 0, 0),
    "more than there are": (200, 90, 80, 70),
    "negative": (5, -7, 129, 100),
    "whole tiles": (64, 128, 0, 108),
}


def spans(sizes, rows):
    """Return the first row of each group, and the end of its last."""
    ends = np.minimum(np.cumsum(np.clip(np.asarray(sizes, np.int64), 0, rows)), rows)
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _relu(x):
    return np.maximum(x, 0)


ACTIVATIONS = {
    None: lambda x: x,
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "relu": _relu,
    "relu2": lambda x: _relu(x) ** 2,
}


def product(lhs, rhs, sizes, *, transpose_rhs=False, activation=None, gate=None, row_scale=None):
    lhs = np.asarray(lhs, np.float32)
    matrices, gates = (x if x is None else _matrices(x, transpose_rhs=transpose_rhs) for x in (rhs, gate))
    out = np.zeros((lhs.shape[0], matrices.shape[2]), np.float32)
    for group, (start, end) in enumerate(spans(sizes, lhs.shape[0])):
        out[start:end] = ACTIVATIONS[activation](lhs[start:end] @ matrices[group])
        if gate is not None:
            out[start:end] *= lhs[start:end] @ gates[group]
        if row_scale is not None:
            out[start:end] *= np.asarray(row_scale)[start:end, None]
    return out


def _matrices(x, *, transpose_rhs):
    x = np.asarray(x, np.float32)
    return x.swapaxes(1, 2) if transpose_rhs else x


def weights_gradient(lhs, rhs, sizes):
    lhs, rhs = np.asarray(lhs, np.float32), np.asarray(rhs, np.float32)
    return np.stack([lhs[start:end].T @ rhs[start:end] for start, end in spans(sizes, lhs.shape[0])])


def normal(*shape, dtype="bfloat16", seed=0):
    return on_device(np.random.default_rng(seed).standard_normal(shape), dtype)


def with_nan_behind(x, sizes):
    """Return rows with NaN in those past the last group."""
    return x.at[spans(sizes, x.shape[0])[-1][1] :].set(jnp.nan)


def with_nan_outside(x, sizes, own):
    """Return rows with NaN in those that belong to none of the groups `own`."""
    inside = np.zeros(x.shape[0], bool)
    for start, end in spans(sizes, x.shape[0])[own]:
        inside[start:end] = True
    return jnp.where(inside[:, None], x, jnp.nan)


def only(own, rhs):
    """Return matrices, those of other groups than `own` zero."""
    return np.concatenate([np.zeros_like(rhs[: own.start]), rhs[own], np.zeros_like(rhs[own.stop :])])


def assert_near(expected, actual, error=4e-3):
    """Compare by the norm; NaN anywhere is a difference."""
    actual = np.asarray(actual, np.float32)
    assert np.isfinite(actual).all()
    assert np.linalg.norm(actual - expected) <= error * np.linalg.norm(expected)
