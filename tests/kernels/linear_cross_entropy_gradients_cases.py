# SPDX-License-Identifier: Apache-2.0
"""Gradients that are made together with the statistics of the logits."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from tests.arrays import on_device
from tests.kernels.conformance import Backend, Subject
from tests.kernels.linear_cross_entropy_cases import COLUMNS, call_of, in_use

from ejkernel.kernels.linear_cross_entropy.xla import XlaParams
from ejkernel.modules import LinearCrossEntropyGradients


def weighted(*sizes, **options):
    """Return a call with random factors of the tokens' losses."""

    def call(dtype):
        (x, weight, labels, *bias), given = call_of(*sizes, **options)(dtype)
        factors = on_device(np.random.default_rng(1).random(labels.shape), jnp.float32)
        return (x, weight, labels, jnp.where(labels == -100, 0, factors), *bias), given

    return call


SUBJECT = Subject(
    operation=LinearCrossEntropyGradients(),
    calls={
        "plain": weighted((12,), 8, 37),
        "all options": weighted(
            (13,),
            8,
            37,
            bias=True,
            padded=3,
            transpose_weight=True,
            statistics=("max",),
            gradients=("x", "weight", "bias"),
            label_smoothing=0.1,
            z_loss=0.01,
            logits_soft_cap=3.0,
            logits_scale=0.7,
        ),
    },
    briefly=("plain",),
    backends={
        "mosaic_gpu": Backend(dtypes=("bfloat16",)),
        "xla": Backend(dtypes=("float32", "bfloat16", "float16"), params=(XlaParams(chunk=5), COLUMNS)),
    },
    tolerance={"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3},
    spaces={"one head": in_use(8192, 4096, 128256, ((8192,), "float32"))},
    odd={
        "odd sizes": in_use(1333, 264, 8200, ((1333,), "float32"), transpose_weight=True),
        "odd vocabulary": in_use(333, 384, 8201, ((333,), "float32"), transpose_weight=True),
        "pieces": in_use(1333, 264, 8200, ((1333,), "float32")),
    },
)
