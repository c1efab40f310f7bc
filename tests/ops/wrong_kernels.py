# SPDX-License-Identifier: Apache-2.0
"""Kernels that break their contract, each in one way; and kernels of unusual forms that keep it."""

from __future__ import annotations

import ctypes
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from tests.ops.sample_kernels import Plain, WithResiduals, WithRule, tanh_matmul, tanh_matmul_gradients

from ejkernel.ops import ConfigSpace, Kernel, UnsupportedError, tune

_counter = itertools.count()


class Referenced(Plain):
    """Right, with two configurations and a reference."""

    def config_space(self, inv):
        return [0, 1]

    def reference(self, x, w):
        return tanh_matmul(x, w)


class GradientOfOneArgument(WithRule):
    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        dx, dw = super().custom_vjp(primals, cfg, kwargs, cotangents)
        return dx, 2 * dw


class ForgottenGradient(WithRule):
    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return super().custom_vjp(primals, cfg, kwargs, cotangents)[0], None


class GradientOfOneConfiguration(WithRule):
    def config_space(self, inv):
        return [0, 1]

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        dx, dw = super().custom_vjp(primals, cfg, kwargs, cotangents)
        return dx * (1 + cfg), dw


class RaisingRule(WithRule):
    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return super().custom_vjp(primals, cfg, kwargs, cotangents)[:1]


class NoTuple(WithRule):
    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return "gradients"


class GradientOfResiduals(WithResiduals):
    def vjp(self, residuals, out, cotangents, x, w, *, cfg):
        return tanh_matmul_gradients(x, w, residuals["y"] * 0.5, cotangents[0])


class ForwardWithResiduals(WithResiduals):
    def fwd_with_residuals(self, x, w, *, cfg):
        y, residuals = super().fwd_with_residuals(x, w, cfg=cfg)
        return y + 1, residuals


class DtypeOfGradient(WithRule):
    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        dx, dw = super().custom_vjp(primals, cfg, kwargs, cotangents)
        return dx.astype(jnp.bfloat16).astype(jnp.float32), dw.astype(jnp.float16)


class OneConfiguration(Referenced):
    def run(self, x, w, *, cfg):
        return tanh_matmul(x, w) + cfg


class RaisingConfiguration(Referenced):
    def run(self, x, w, *, cfg):
        return tanh_matmul(x, w).reshape(-1 if not cfg else 7, 3)


class Exiting(Referenced):
    def run(self, x, w, *, cfg):
        if cfg:
            raise SystemExit(0)
        return tanh_matmul(x, w)


class ExitingHeuristic(Plain):
    def heuristic_cfg(self, inv):
        raise KeyboardInterrupt


class TypeOfConfiguration(Referenced):
    def run(self, x, w, *, cfg):
        return tanh_matmul(x, w).astype(jnp.float16 if cfg else jnp.float32)


class TypeOfSecondResult(Plain):
    def run(self, x, w, *, cfg):
        y = tanh_matmul(x, w)
        return y, y.astype(jnp.float16 if cfg else jnp.float32)

    def config_space(self, inv):
        return [0, 1]


class StructureOfConfiguration(Referenced):
    def run(self, x, w, *, cfg):
        return [tanh_matmul(x, w)] if cfg else tanh_matmul(x, w)


class WideReference(WithRule):
    """Half as precise as its reference, with a wrong gradient."""

    factor = 2.0

    def run(self, x, w, *, cfg):
        return tanh_matmul(x, w).astype(jnp.bfloat16)

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        assert cotangents[0].dtype == jnp.bfloat16
        dx, dw = super().custom_vjp(primals, cfg, kwargs, (cotangents[0].astype(jnp.float32),))
        return dx, self.factor * dw

    def reference(self, x, w):
        return tanh_matmul(x, w)


class RightWithWideReference(WideReference):
    factor = 1.0


class WrongReference(Referenced):
    def reference(self, x, w):
        return jnp.tan(x @ w)


class Nan(Plain):
    def run(self, x, w, *, cfg):
        return jnp.log(tanh_matmul(x, w))


class Random(Plain):
    """Draws its numbers while it is traced."""

    def run(self, x, w, *, cfg):
        return tanh_matmul(x, w) + next(_counter)


class Counting(Plain):
    """Another result at each call."""

    def run(self, x, w, *, cfg):
        return jax.pure_callback(lambda x, w: np.tanh(np.asarray(x) @ w) + next(_counter), _like(x, w), x, w)


def _like(x, w):
    return jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)


class InPlace(Plain):
    """Overwrites the array at `address`, which another caller owns."""

    address = None

    def run(self, x, w, *, cfg):
        return jax.pure_callback(self._overwriting, _like(x, w), x, w)

    def _overwriting(self, x, w):
        if self.address is not None:
            ctypes.memset(self.address, 0, 4)
        return np.tanh(np.asarray(x) @ np.asarray(w))


class Leaking(Plain):
    """Keeps an array of the first trace."""

    def run(self, x, w, *, cfg):
        if not hasattr(self, "kept"):
            self.kept = jnp.tanh(x).sum()
        return tanh_matmul(x, w) + 0 * self.kept


@custom_vmap
def _batched_wrongly(x, w):
    return tanh_matmul(x, w)


@_batched_wrongly.def_vmap
def _wrong(axis_size, in_batched, x, w):
    return jax.vmap(tanh_matmul, [0 if batched else None for batched in in_batched])(x, w) * 2, True


@custom_vmap
def _second_unbatched(x, w):
    return tanh_matmul(x, w)


@_second_unbatched.def_vmap
def _first_of_second(axis_size, in_batched, x, w):
    if in_batched[0]:
        return jax.vmap(tanh_matmul, [0 if batched else None for batched in in_batched])(x, w), True
    return jnp.broadcast_to(tanh_matmul(x, w[0]), (axis_size, x.shape[0], w.shape[2])), True


class UnderVmap(WithRule):
    def run(self, x, w, *, cfg):
        return _batched_wrongly(x, w)


class UnderVmapAlone(WithResiduals):
    """Wrong under `vmap`, and right under `vmap` of a gradient."""

    def run(self, x, w, *, cfg):
        return _batched_wrongly(x, w)


class ForZerosAlone(WithResiduals):
    """Wrong for zeros, and for odd sizes, where nothing differentiates."""

    def run(self, x, w, *, cfg):
        y = tanh_matmul(x, w)
        return y + 1 if y.shape[1] == 5 else jnp.where(y == 0, jnp.nan, y)

    def reference(self, x, w):
        return tanh_matmul(x, w)


class BatchedSecond(WithRule):
    """Wrong where `w` alone is batched."""

    def run(self, x, w, *, cfg):
        return _second_unbatched(x, w)


@custom_vmap
def _gradients(x, w, ct):
    return tanh_matmul_gradients(x, w, tanh_matmul(x, w), ct)


@_gradients.def_vmap
def _unsummed(axis_size, in_batched, x, w, ct):
    axes = [0 if batched else None for batched in in_batched]
    dx, dw = jax.vmap(_gradients.fun, axes)(x, w, ct)
    return (dx, dw * 2 if in_batched[1] else dw), (True, True)


class WrongUnderVmapOfGrad(WithRule):
    """Its gradient is wrong where `w` is batched."""

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return _gradients(*primals, cotangents[0])


@jax.custom_jvp
def _pushed_wrongly(x):
    return jnp.tanh(x)


@_pushed_wrongly.defjvp
def _wrong_tangent(primals, tangents):
    return jnp.tanh(primals[0]), tangents[0]


class WrongTangents(Referenced):
    def run(self, x, w, *, cfg):
        return _pushed_wrongly(x @ w)

    def config_space(self, inv):
        return [0]


class Take(Kernel[int, jax.Array]):
    """Rows of `x` selected by `index` and `mask`; with a rule."""

    def run(self, x, index, mask, *, cfg):
        return jnp.where(mask[:, None], x[index], 0)

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        x, index, mask = primals
        return jnp.zeros_like(x).at[index].add(jnp.where(mask[:, None], cotangents[0], 0)), None, None

    def reference(self, x, index, mask):
        return jnp.stack([x[i] for i in index]) * mask[:, None]

    def heuristic_cfg(self, inv):
        return 0


class TakeWithoutMask(Take):
    def run(self, x, index, mask, *, cfg):
        return x[index]


class Unpicklable(Plain):
    def __init__(self):
        super().__init__("unpicklable")
        self.function = lambda x, w: jnp.tanh(x @ w)

    def run(self, x, w, *, cfg):
        return self.function(x, w)


class Forgetful(Plain):
    """Loses its factor on the way to another process."""

    def __init__(self, factor=1.0):
        super().__init__("forgetful")
        self.factor = factor

    def run(self, x, w, *, cfg):
        return tanh_matmul(x, w) * self.factor

    def __reduce_ex__(self, protocol):
        return Forgetful, ()


class Activated(Plain):
    """Takes a function."""

    def run(self, x, w, *, cfg, activation):
        return activation(x @ w)


class TritonThatRaises(Plain):
    def run_triton(self, x, w, *, cfg):
        raise ValueError("no such tile")


class EvenForTriton(Plain):
    def reference(self, x, w):
        return tanh_matmul(x, w)

    def run_triton(self, x, w, *, cfg):
        if x.shape[0] % 2:
            raise ValueError("no such tile")
        return tanh_matmul(x, w)


class OnlyForGpu(Kernel[int, jax.Array]):
    def run_triton(self, x, w, *, cfg):
        return tanh_matmul(x, w)

    def heuristic_cfg(self, inv):
        return 0


class ForTpu(Kernel[int, jax.Array]):
    """Doubles `x`, `cfg` rows at a time; in Pallas for TPUs."""

    def run(self, x, *, cfg):
        return x + x

    def run_pallas(self, x, *, cfg):
        from jax.experimental import pallas as pl

        def double(x_ref, out_ref):
            out_ref[...] = x_ref[...] + x_ref[...]

        block = pl.BlockSpec((cfg, x.shape[1]), lambda i: (i, 0))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(double, grid=(len(x) // cfg,), in_specs=[block], out_specs=block, out_shape=shape)(x)

    def heuristic_cfg(self, inv):
        return 8

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return (2 * cotangents[0],)


class MisalignedForTpu(ForTpu):
    def config_space(self, inv):
        return [8, 4]


class WeaklyTyped(Plain):
    def run(self, x, w, *, cfg):
        return tanh_matmul(x, w).astype(jnp.result_type(x, jnp.bfloat16))


class ImpreciseInHalf(Referenced):
    def run(self, x, w, *, cfg):
        return tanh_matmul(x, w) * (1.5 if x.dtype == jnp.bfloat16 else 1)


class Float32Alone(Referenced):
    def run(self, x, w, *, cfg):
        if x.dtype != jnp.float32:
            raise UnsupportedError("x must be float32")
        return tanh_matmul(x, w)


class NoSpace(Plain):
    def config_space(self, inv):
        return None


class RaisingHeuristic(Plain):
    def heuristic_cfg(self, inv):
        raise ZeroDivisionError("rows")


class Undifferentiable(Plain):
    """As a kernel in another language without a rule."""

    def run(self, x, w, *, cfg):
        return jax.pure_callback(
            lambda x, w: np.tanh(np.asarray(x) @ np.asarray(w)), _like(x, w), x, w, vmap_method="sequential"
        )


class UndifferentiableWithRule(Undifferentiable):
    """As one with a rule, which nothing but differences can be held against."""

    factor = 1.0

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        dx, dw = tanh_matmul_gradients(*primals, tanh_matmul(*primals), cotangents[0])
        return dx, dw * self.factor


class WrongUndifferentiableWithRule(UndifferentiableWithRule):
    factor = -1.0


class Trees(Kernel[int, dict]):
    """Containers in and out, an integer result, and an array by keyword, with a rule."""

    def run(self, pair, state, *, cfg, shift):
        return {"sum": pair[0] + pair[1] * state["scale"] + shift, "count": state["count"] + 1}

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        (_, second), state = primals
        ct = cotangents[0]["sum"]
        return (ct, ct * state["scale"]), {"scale": (ct * second).sum(), "count": None}

    def heuristic_cfg(self, inv):
        return 0


class Dropout(Kernel[int, jax.Array]):
    """Takes a random key."""

    def run(self, x, key, *, cfg):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)

    def heuristic_cfg(self, inv):
        return 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _scaled(x, factor):
    return factor * jnp.sin(x)


_scaled.defvjp(lambda x, factor: (_scaled(x, factor), x), lambda factor, x, ct: (ct * jnp.cos(x),))


@tune(space={"rows": [1, 2]})
def wrong_inside(x, *, rows=1):
    """Its `custom_vjp` forgets the factor, and it has no reference."""
    return _scaled(x.reshape(rows, -1), 3.0).reshape(x.shape)


@tune(space={"rows": lambda inv: [n for n in (1, 2, 4) if inv.args[0].size % n == 0]}, reference=jnp.sin)
def right_sine(x, *, rows=1):
    return jnp.sin(x.reshape(rows, -1)).reshape(x.shape)


large = ConfigSpace({"a": list(range(10)), "b": list(range(10))})


@tune(space=large)
def of_many(x, *, a=0, b=0):
    return x + 0 * (a + b)


def made_inside():
    """Return a kernel that no other process finds."""

    @tune(space={"rows": [1, 2]})
    def inner(x, *, rows=1):
        return x

    return inner


_RIGHT = (
    Referenced,
    RightWithWideReference,
    Take,
    Float32Alone,
    Undifferentiable,
    UndifferentiableWithRule,
    Trees,
    Dropout,
    Activated,
    ForTpu,
    OnlyForGpu,
)
for _kind in list(vars().values()):
    if isinstance(_kind, type) and issubclass(_kind, Kernel) and _kind.__module__ == __name__:
        _kind.is_wrong = _kind not in _RIGHT
