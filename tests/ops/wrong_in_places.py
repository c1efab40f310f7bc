# SPDX-License-Identifier: Apache-2.0
"""Kernels with errors for some inputs or configurations only, each in one way; and similar correct kernels."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ejkernel.ops import Kernel, UnsupportedError


class Sine(Kernel[int, jax.Array]):
    """Right: the sine, with residuals that every backward understands."""

    def run(self, x, *, cfg):
        return jnp.sin(x)

    def reference(self, x):
        return jnp.sin(x)

    def heuristic_cfg(self, inv):
        return 1

    def config_space(self, inv):
        return [1, 2, 4]

    def fwd_with_residuals(self, x, *, cfg):
        return jnp.sin(x), jnp.cos(x)

    def vjp(self, residuals, out, cotangents, x, *, cfg):
        return (cotangents[0] * residuals,)


# --- residuals ---


class ScaledResiduals(Sine):
    """Each backward undoes the scale of its own forward only."""

    def fwd_with_residuals(self, x, *, cfg):
        return jnp.sin(x), jnp.cos(x) * cfg

    def vjp(self, residuals, out, cotangents, x, *, cfg):
        return (cotangents[0] * residuals / cfg,)


class ResidualsByBlock(Sine):
    """The shape of the residuals depends on the configuration."""

    def fwd_with_residuals(self, x, *, cfg):
        return jnp.sin(x), jnp.cos(x).reshape(cfg, -1)

    def vjp(self, residuals, out, cotangents, x, *, cfg):
        return (cotangents[0] * residuals.reshape(x.shape),)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sine(x, cfg):
    return jnp.sin(x)


_sine.defvjp(lambda x, cfg: (jnp.sin(x), jnp.cos(x) * cfg), lambda cfg, saved, ct: (ct * saved / cfg,))


class KeptByConfiguration(Sine):
    """The configuration scales JAX's residuals of `run`."""

    fwd_with_residuals, vjp = Kernel.fwd_with_residuals, Kernel.vjp
    keeps_residuals = True

    def run(self, x, *, cfg):
        return _sine(x, cfg)


class WrongBackwardConfiguration(Sine):
    """The backward has separate configurations, and one of them is wrong."""

    def bwd_heuristic_cfg(self, inv):
        return 7

    def bwd_config_space(self, inv):
        return [7, 8]

    def vjp(self, residuals, out, cotangents, x, *, cfg):
        return (cotangents[0] * residuals * (2 if cfg == 8 else 1),)


# --- dtypes ---


class Scaled(Kernel[int, jax.Array]):
    """Right: twice the argument."""

    def run(self, x, *, cfg):
        return 2 * x

    def reference(self, x):
        return x + x

    def heuristic_cfg(self, inv):
        return 1

    def config_space(self, inv):
        return [1, 2, 4]


class RaisingInFloat16(Scaled):
    """Crashes for one dtype under one configuration."""

    def run(self, x, *, cfg):
        return x.missing if cfg == 4 and x.dtype == jnp.float16 else 2 * x


class RaisingInBfloat16(Scaled):
    """Crashes for one dtype under every configuration."""

    def run(self, x, *, cfg):
        return x.missing if x.dtype == jnp.bfloat16 else 2 * x


class WrongInFloat16(Scaled):
    def run(self, x, *, cfg):
        return (3 if cfg == 4 and x.dtype == jnp.float16 else 2) * x


class WrongInBfloat16(Scaled):
    def run(self, x, *, cfg):
        return (3 if cfg == 2 and x.dtype == jnp.bfloat16 else 2) * x


class WrongGradientInFloat16(Scaled):
    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return ((3 if cfg == 2 and primals[0].dtype == jnp.float16 else 2) * cotangents[0],)


# --- batches ---


def _wrong_above(size, arrays):
    """Return the sum of two arrays; wrong if more than `size` examples of exactly `arrays` arrays are batched."""

    @custom_vmap
    def add(x, y):
        return x + y

    @add.def_vmap
    def _batched(axis_size, in_batched, x, y):
        return (x + y) * (2 if axis_size > size and sum(in_batched) == arrays else 1), True

    return add


_above_four, _above_eight, _above_eight_of_one = _wrong_above(4, 2), _wrong_above(8, 2), _wrong_above(8, 1)


class Sum(Kernel[int, jax.Array]):
    """Right: the sum of two arrays."""

    add = staticmethod(jnp.add)

    def run(self, x, y, *, cfg):
        return self.add(x, y)

    def reference(self, x, y):
        return x + y

    def heuristic_cfg(self, inv):
        return 1


class WrongAboveFour(Sum):
    add = staticmethod(_above_four)


class WrongAboveEight(Sum):
    add = staticmethod(_above_eight)


class WrongAboveEightOfOne(Sum):
    add = staticmethod(_above_eight_of_one)


# --- sizes ---


class WithoutTail(Scaled):
    """Rows beyond the last whole block are left zero."""

    def run(self, x, *, cfg):
        whole = len(x) // cfg * cfg
        return jnp.zeros_like(x).at[:whole].set(2 * x[:whole])

    def heuristic_cfg(self, inv):
        return 2

    def config_space(self, inv):
        return [2]


class ShorterByTail(WithoutTail):
    def run(self, x, *, cfg):
        return 2 * x[: len(x) // cfg * cfg]


class GradientWithoutTail(WithoutTail):
    def run(self, x, *, cfg):
        return 2 * x

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return (WithoutTail.run(self, cotangents[0], cfg=cfg),)


class TailOfColumns(Scaled):
    """The same along the second axis, under one configuration."""

    def run(self, x, *, cfg):
        whole = x.shape[1] // cfg * cfg
        return jnp.zeros_like(x).at[:, :whole].set(2 * x[:, :whole])

    def config_space(self, inv):
        return [1, 2]


# --- values ---


class Softmax(Kernel[int, jax.Array]):
    """Right: a softmax of rows."""

    def run(self, x, *, cfg):
        powers = jnp.exp(x - x.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)

    def reference(self, x):
        return jax.nn.softmax(x, -1)

    def heuristic_cfg(self, inv):
        return 1


class Overflowing(Softmax):
    def run(self, x, *, cfg):
        powers = jnp.exp(x)
        return powers / powers.sum(-1, keepdims=True)


class OverflowingUnderOneConfiguration(Softmax):
    def run(self, x, *, cfg):
        return Overflowing.run(self, x, cfg=cfg) if cfg == 2 else super().run(x, cfg=cfg)

    def config_space(self, inv):
        return [1, 2]


class OverflowingGradient(Softmax):
    def run(self, x, *, cfg):
        return jnp.tanh(x)

    def reference(self, x):
        return jnp.tanh(x)

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        power = jnp.exp(2 * primals[0])
        return (cotangents[0] * 4 * power / (power + 1) ** 2,)


class Unit(Kernel[int, jax.Array]):
    """Right: rows of length one, and zeros where a row has none."""

    def run(self, x, *, cfg):
        length = self.length(x)
        return jnp.where(length > 0, x / jnp.where(length > 0, length, 1), 0)

    def length(self, x):
        square = (x * x).sum(-1, keepdims=True)
        return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)

    def reference(self, x):
        return Unit().run(x, cfg=0)

    def heuristic_cfg(self, inv):
        return 1


class ZeroByZero(Unit):
    def run(self, x, *, cfg):
        return x / self.length(x)


class ZeroByZeroInGradient(Unit):
    def length(self, x):
        return jnp.sqrt((x * x).sum(-1, keepdims=True))


class LostForSmall(Unit):
    def run(self, x, *, cfg):
        return x / (self.length(x) + 1e-4)


class ZeroByZeroOfOne(Sum):
    def run(self, x, y, *, cfg):
        return x + y * (y / y)


# --- second derivatives ---


class ConstantGradient(Sine):
    """A correct gradient, but treated as constant in the second derivative."""

    def vjp(self, residuals, out, cotangents, x, *, cfg):
        return (cotangents[0] * jax.lax.stop_gradient(jnp.cos(x)),)


# --- right ones that look alike ---


class Versine(Kernel[int, jax.Array]):
    """`1 - cos(x)` without cancellation; the reference has little left of small numbers."""

    def run(self, x, *, cfg):
        return 2 * jnp.sin(x / 2) ** 2

    def reference(self, x):
        return 1 - jnp.cos(x)

    def heuristic_cfg(self, inv):
        return 1


class Kinked(Versine):
    """At zero it has a different, equally valid gradient."""

    def run(self, x, *, cfg):
        return jnp.where(x > 0, x, 0)

    def reference(self, x):
        return jnp.maximum(x, 0)


class Saturating(Versine):
    """Of large numbers nothing but rounding is left of the gradient."""

    def run(self, x, *, cfg):
        small = jnp.exp(-2 * jnp.abs(x))
        return jnp.sign(x) * (1 - small) / (1 + small)

    def reference(self, x):
        return jnp.tanh(x)


class Shifted(Softmax):
    """A softmax, which a shift does not change: nothing but rounding is left of the shift's gradient."""

    def run(self, x, shift, *, cfg):
        powers = jnp.exp(x + shift[:, None] - (x + shift[:, None]).max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)

    def reference(self, x, shift):
        return jax.nn.softmax(x + shift[:, None], -1)

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        out = self.run(*primals, cfg=cfg)
        dx = out * (cotangents[0] - (out * cotangents[0]).sum(-1, keepdims=True))
        return dx, dx.sum(-1)


class Peaked(Versine):
    """A softmax of products, which large numbers make an `argmax`."""

    def run(self, x, *, cfg):
        return Softmax.run(self, jnp.einsum("ij,kj->ik", x, x[:, ::-1]), cfg=cfg)

    def reference(self, x):
        return jax.nn.softmax(x @ x[:, ::-1].T, -1)


class Powers(Versine):
    """Overflows where the reference does."""

    def run(self, x, *, cfg):
        return jnp.exp(x) * jnp.exp(x)

    def reference(self, x):
        return jnp.exp(2 * x)


class Positions(Versine):
    """Positions of the maximum; they differ from the reference if several values are equal."""

    def run(self, x, *, cfg):
        return x.shape[-1] - 1 - jnp.argmax(x[..., ::-1], -1)

    def reference(self, x):
        return jnp.argmax(x, -1)


class Roots(Versine):
    """Needs positive values, as in its author's inputs."""

    def run(self, x, *, cfg):
        return jnp.exp(jnp.log(x) / 2)

    def reference(self, x):
        return jnp.sqrt(x)

    def example_inputs(self, inv, rng):
        (x,) = inv.args
        return (rng.uniform(0.5, 1.0, x.shape).astype(x.dtype),), {}


class BlocksOfRows(Scaled):
    """Has a second implementation, whose blocks must divide the rows, and a space that does not say so."""

    def config_space(self, inv):
        return [{"implementation": name, "rows": rows} for name in ("plain", "blocks") for rows in (1, 2, 4, 8, 16)]

    def heuristic_cfg(self, inv):
        return {"implementation": "plain", "rows": 1}

    def run(self, x, *, cfg):
        rows = cfg["rows"] if cfg["implementation"] == "blocks" and cfg["rows"] < 8 else 1
        return (2 * x.reshape(-1, rows, x.shape[-1])).reshape(x.shape)


class WithoutReference(Scaled):
    """The heuristic's block does not divide an odd number of rows, but another configuration's does."""

    reference = Kernel.reference

    def heuristic_cfg(self, inv):
        return 2

    def run(self, x, *, cfg):
        return (2 * x.reshape(-1, cfg, x.shape[-1])).reshape(x.shape)


class SpaceOfEvenRows(Scaled):
    """The space crashes for an odd number of rows."""

    def config_space(self, inv):
        return [1, {0: 2}[len(inv.args[0]) % 2]]


class BackwardWithoutTail(Sine):
    """One of the backward's own configurations leaves out the rest of the rows."""

    def bwd_heuristic_cfg(self, inv):
        return 7

    def bwd_config_space(self, inv):
        return [7, 8]

    def vjp(self, residuals, out, cotangents, x, *, cfg):
        kept = jnp.arange(len(x)) < (len(x) // 2 * 2 if cfg == 8 else len(x))
        return (cotangents[0] * residuals * kept[:, None],)


class EvenRows(Scaled):
    """Refuses an odd number of rows."""

    def run(self, x, *, cfg):
        if len(x) % 2:
            raise UnsupportedError(f"x must have an even number of rows, got {len(x)}; pad it")
        return 2 * x


class Repeated(Sum):
    """Has a static argument that also sets a length."""

    def run(self, x, y, *, cfg, rows):
        return x[:rows] + y[:rows]

    def reference(self, x, y, *, rows):
        return x[:rows] + y[:rows]


class Poles(Versine):
    """Is not finite at zero, as the reference."""

    def run(self, x, *, cfg):
        return jnp.log(jnp.abs(x)) + 1 / x

    def reference(self, x):
        return 1 / x + 0.5 * jnp.log(x * x)
