# SPDX-License-Identifier: Apache-2.0
"""Powers of two by a polynomial."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._hopper.exponentials import exp2_by_fma


def test_powers_of_two_are_exact_to_half_precision():
    x = np.concatenate([np.linspace(-124, -3, 5001), np.linspace(-3, 100, 9001)]).astype(np.float32)
    found = np.asarray(exp2_by_fma(jnp.asarray(x)), np.float64)
    np.testing.assert_allclose(found, np.exp2(x.astype(np.float64)), rtol=1e-4)


def test_small_powers_become_tiny_and_never_negative():
    found = np.asarray(exp2_by_fma(jnp.float32([-125.5, -200, -1e30])))
    assert ((found > 0) & (found < 1e-37)).all()
