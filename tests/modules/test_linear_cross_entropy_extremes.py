# SPDX-License-Identifier: Apache-2.0
"""`linear_cross_entropy` and `token_log_probs` with extreme options: huge logits, small dtypes, removed labels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.linear_cross_entropy.xla import XlaParams
from ejkernel.modules import LinearCrossEntropyConfig, linear_cross_entropy, token_log_probs
from ejkernel.ops import ArgumentError

pytestmark = pytest.mark.slow

FORMS = {
    "rows": LinearCrossEntropyConfig(fwd=XlaParams(chunk=30), bwd=XlaParams(chunk=30)),
    "vocabulary": LinearCrossEntropyConfig(
        fwd=XlaParams(form="vocabulary", chunk=20), bwd=XlaParams(form="vocabulary", chunk=20)
    ),
}
_rng = np.random.default_rng(0)
X, WEIGHT = (jnp.asarray(_rng.standard_normal(shape), jnp.float32) for shape in ((64, 8), (8, 50)))
LABELS = jnp.asarray(_rng.integers(0, 50, 64))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("temperature", [1e-6, 1e-9, 1e-20])
def test_a_tiny_temperature_gives_log_probs_of_the_largest_logit(form, temperature):
    """XLA may fuse scale and subtraction; the largest logit then differs from the maximum by its rounding error."""

    def ours(x):
        return token_log_probs(x, WEIGHT, LABELS, temperature=temperature, return_entropy=True, cfg=FORMS[form])

    (logs, entropy), pull = jax.vjp(jax.jit(ours), X)
    logits = np.asarray(X, np.float64) @ np.asarray(WEIGHT, np.float64)
    expected = np.take_along_axis(logits, LABELS[:, None], 1)[:, 0] - logits.max(axis=1)
    np.testing.assert_allclose(np.asarray(logs) * temperature, expected, atol=1e-5)
    assert (np.asarray(logs) <= 0).all()
    np.testing.assert_allclose(np.asarray(entropy) * temperature, 0, atol=1e-6)
    (gradient,) = pull((jnp.ones(64), jnp.zeros(64)))
    assert np.abs(gradient).max() * temperature < 10


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [20.0, 1000.0])
def test_gradients_in_float16_do_not_overflow_with_a_large_scale(form, scale):
    x, weight, bias = X.astype("float16"), WEIGHT.astype("float16"), WEIGHT[0].astype("float16")

    def ours(x, weight, bias):
        options = {"bias": bias, "logits_scale": scale, "reduction": "none", "cfg": FORMS[form]}
        return linear_cross_entropy(x, weight, LABELS, **options).mean()

    def plain(*arrays):
        x, weight, bias = (array.astype(jnp.float32) for array in arrays)
        logits = (jnp.matmul(x, weight, precision="highest") + bias) * scale
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), LABELS[:, None], 1).mean()

    expected, found = (jax.jit(jax.grad(loss, (0, 1, 2)))(x, weight, bias) for loss in (plain, ours))
    for wanted, got in zip(expected, found, strict=True):
        wanted, got = (np.asarray(array, np.float32) for array in (wanted, got))
        np.testing.assert_allclose(got, wanted, atol=2e-3 * np.abs(wanted).max())


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_smoothing_alone_does_not_read_the_logit_of_a_removed_label(reduction):
    bias, labels = jnp.zeros(50).at[3].set(-jnp.inf), jnp.full(64, 3)

    def ours(x):
        options = {"bias": bias, "label_smoothing": 1.0, "reduction": reduction}
        return linear_cross_entropy(x, WEIGHT, labels, **options).mean()

    def plain(x):
        logits = jnp.delete(jnp.matmul(x, WEIGHT, precision="highest"), 3, axis=1)
        return (jax.nn.logsumexp(logits, axis=1) - logits.mean(axis=1)).mean()

    expected, found = (jax.jit(jax.value_and_grad(loss))(X) for loss in (plain, ours))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(y, x, atol=1e-5), expected, found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logits_soft_cap": 1e39}, "logits_soft_cap must be between 1e-30 and 1e.30, .*; got 1e.39"),
        ({"logits_soft_cap": 1e-46}, "logits_soft_cap must be between 1e-30 and 1e.30, .*; got 1e-46"),
        ({"logits_scale": 10**400}, "logits_scale must be between 1e-30 and 1e.30, .*; got 1000"),
        ({"z_loss": 1e39}, r"z_loss must be a number from 0 to 1e\+30, got 1e\+39"),
        ({"z_loss": float("nan")}, r"z_loss must be a number from 0 to 1e\+30, got nan"),
    ],
)
def test_numbers_that_float32_cannot_compute_with_are_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        linear_cross_entropy(X, WEIGHT, LABELS, **options)
