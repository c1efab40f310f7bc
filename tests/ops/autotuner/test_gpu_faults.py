# SPDX-License-Identifier: Apache-2.0
"""Candidates that a GPU's context does not survive."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from tests.ops.faulty_gpu_kernels import FAST, SIZE, treacherous

from ejkernel.ops.autotuner.bench.oracle import Limits
from ejkernel.ops.autotuner.compile.threads import AdaptiveTimeout
from ejkernel.ops.autotuner.tuner import Autotuner
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.core.invocation import Invocation


def test_a_deadlock_and_a_write_out_of_bounds_fail_alone(gpu):
    x = jax.ShapeDtypeStruct((SIZE,), jnp.float32)
    tuner = Autotuner(limits=Limits(run=AdaptiveTimeout(first=60.0, least=10.0)))
    inv = Invocation(kernel=treacherous, args=(x,))
    data = tuner.tune(inv, treacherous, policy=AutotunePolicy(isolate=True))
    statuses = {outcome.config.kind: outcome for outcome in data.outcomes[1:]}
    assert statuses["deadlock"].status == "crashed"
    assert "no sign of life" in statuses["deadlock"].reason
    assert statuses["out of bounds"].status in ("crashed", "failed")
    assert data.config == FAST
    on_gpu = jax.device_put(jnp.arange(8.0), gpu)
    assert float(jnp.sum(on_gpu)) == 28.0  # the device still works in this process
