# SPDX-License-Identifier: Apache-2.0
"""`quantized_dense`, `quantized_grouped_dense`: layers with 8-bit matmuls for training, and `DelayedScaling`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ejkernel import compat
from ejkernel.kernels._merging import Merging
from ejkernel.kernels._options import check_values, int32, type_text
from ejkernel.kernels.grouped_matmul._arguments import check_sizes
from ejkernel.kernels.quantized_matmul.first_gradients import by_gradients, once
from ejkernel.kernels.quantized_matmul.operation import OUTPUTS
from ejkernel.kernels.quantized_matmul.quantized import LARGEST, Quantized, canonical_dtype, quantize_by
from ejkernel.kernels.quantized_matmul.quantizing.common import BLOCK
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.utils.messages.names import names_checked
from ejkernel.ops.utils.values.signature import is_array

from .grouped_matmul import grouped_matmul, grouped_matmul_wgrad
from .quantized_matmul import quantize, quantize_both, quantized_matmul

_FLOATS = ("float8_e4m3fn", "float8_e5m2")


@functools.partial(jax.tree_util.register_dataclass, data_fields=("x", "w", "gradient"), meta_fields=())
@dataclasses.dataclass(frozen=True, eq=False)
class DelayedScaling:
    """The largest magnitudes that one `quantized_dense` layer saw in its last steps, the latest first.

    A step scales each array by the largest magnitude of the steps before, so it need not read the array first. A pytree
    of three float32 vectors of the same length.

    Attributes:
        x: Of the rows.
        w: Of the matrix.
        gradient: Of the result's gradient.
    """

    x: jax.Array
    w: jax.Array
    gradient: jax.Array

    @classmethod
    def start(cls, length: int = 16) -> DelayedScaling:
        """Return an empty history of `length` steps; the first step scales by its own magnitudes."""
        if type(length) is not int or length < 1:
            raise ArgumentError(f"length must be a positive int, got {length!r}; try 16.")
        return cls(*(jnp.zeros(length, jnp.float32) for _ in range(3)))


@names_checked({})
def quantized_dense(
    x: Float[Array, "*rows k"],
    w: Float[Array, "k n"],
    *,
    dtype: DTypeLike = "float8_e4m3fn",
    gradient_dtype: DTypeLike = "float8_e5m2",
    scaling: DelayedScaling | None = None,
    block: Literal[128] | None = None,
    accumulation: Literal["exact", "fast"] = "exact",
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "*rows n"]:
    """Return `x @ w`, with 8-bit matmuls forward and backward, for training with floating-point parameters.

    **Current scaling**, the default: each of the three matmuls quantises its operands with a scale for each row or
    column across the axis that it sums over, from the current numbers. The gradient therefore keeps `x` and `w` as they
    are, not their 8-bit copies.

    **Delayed scaling**: with `scaling`, each array has one scale, from its largest magnitudes in the last steps. The
    gradient keeps the 8-bit copies. The gradient with respect to `scaling` is not a derivative: it is the history for
    the next step, with this step's magnitudes. Give every call its own history:

        loss = lambda w, scaling: jnp.square(quantized_dense(x, w, scaling=scaling) - y).mean()
        gradient, scaling = jax.grad(loss, (0, 1))(w, scaling)

    **Blocks**: with `block=128`, 128 consecutive numbers of `x` and of gradients share a scale, and 128x128 numbers of
    `w`, from the current numbers, so an outlier coarsens few others. The matmul that gives the gradient of `w` reads
    the result's gradient with a scale for 128x128 numbers. `quantize_both` makes the rows and the columns of `x` in one
    pass; the gradient keeps the columns, in 8 bits.

    Numbers beyond the range are clipped; infinity becomes NaN. Under `jit` over a mesh, and with a history that is
    replicated inside `jax.shard_map`, the magnitudes are those of whole arrays. With `check_vma=False`, and where
    gradients of several calls are added, histories would be added too: use current scaling there.

    On Hopper GPUs `mosaic_gpu` runs each matmul of 8-bit numbers.

    Args:
        x: Rows, in bfloat16, float16 or float32.
        w: The matrix.
        dtype: Dtype in which `x` and `w` are multiplied: `float8_e4m3fn`, `float8_e5m2` or `int8`.
        gradient_dtype: Dtype of the result's gradient in matmuls: `float8_e5m2` has more range, `float8_e4m3fn` more
            digits.
        scaling: The history of delayed scaling, for float8 dtypes; `None`: current scaling.
        block: 128 for scales of blocks, `None` for those of rows and columns.
        accumulation: As in `quantized_matmul`.
        implementation: As in `quantized_matmul`, for all three matmuls.

    Returns:
        The result in the dtype of `x`.

    Raises:
        ArgumentError: An argument has the wrong shape, dtype or value.
        UnsupportedError: `implementation` cannot run one of the matmuls, or a tangent (`jax.jvp`) or a second
            derivative is needed.
    """
    if not is_array(x) or not x.shape or not is_array(w) or len(w.shape) != 2 or x.shape[-1] != w.shape[0]:
        raise ArgumentError(f"x must be [..., k] and w a matrix [k, n]; got {type_text(x)} and {type_text(w)}.")
    recipe = _recipe(dtype, gradient_dtype, accumulation, implementation)
    x, w = _of_floats("x", x), _of_floats("w", w)
    if is_array(block) or block not in (None, BLOCK) or (block and scaling is not None):
        raise ArgumentError(f"block must be {BLOCK} or None, and None with scaling; got {block!r}.")
    if scaling is None:
        return (_blocked if block else _dense)(recipe, x, w)
    _check_scaling(scaling)
    if not {recipe.dtype, recipe.gradient_dtype} <= set(_FLOATS):
        names = f"{recipe.dtype} and {recipe.gradient_dtype}"
        raise ArgumentError(f"dtype and gradient_dtype must be {' or '.join(_FLOATS)} with scaling; got {names}.")
    return _delayed(recipe, x, w, jax.tree.map(by_gradients, scaling))


@names_checked({})
def quantized_grouped_dense(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "groups k n"],
    group_sizes: Int[Array, " groups"],
    *,
    dtype: DTypeLike = "float8_e4m3fn",
    gradient_dtype: DTypeLike = "float8_e5m2",
    block: Literal[128] | None = None,
    accumulation: Literal["exact", "fast"] = "exact",
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "m n"]:
    """Return `grouped_matmul(lhs, rhs, group_sizes)` for training, with 8-bit matmuls forward and backward.

    By default two matmuls are in 8 bits, forward and for the gradient of the rows: they quantise their operands with a
    scale for each row or column, from the current numbers. The gradient of `rhs` is `grouped_matmul_wgrad` of the
    operands as they are.

    **Blocks**: with `block=128` all three matmuls are in 8 bits. 128 consecutive numbers of rows and of gradients
    share a scale, and 128x128 numbers of a group's matrix; the gradient of `rhs` reads 128x128 numbers of the result's
    gradient with one scale. `quantize_both` makes rows and columns in one pass; the gradient keeps the columns, in
    which each group begins a block.

    Args:
        lhs: Rows, group after group.
        rhs: A matrix for each group, of the same dtype.
        group_sizes: As for `grouped_matmul`.
        dtype, gradient_dtype, block, accumulation: As for `quantized_dense`.
        implementation: As for `grouped_matmul`, for the 8-bit matmuls.

    Returns:
        The result in the dtype of `lhs`.

    Raises:
        ArgumentError: An argument has the wrong shape, dtype or value.
        UnsupportedError: `implementation` cannot run one of the matmuls, or a tangent (`jax.jvp`) or a second
            derivative is needed.
    """
    if not is_array(lhs) or len(lhs.shape) != 2 or not is_array(rhs) or len(rhs.shape) != 3 or lhs.dtype != rhs.dtype:
        raise ArgumentError(
            f"lhs must be [m, k] and rhs [groups, k, n] of the same dtype; got {type_text(lhs)} and {type_text(rhs)}."
        )
    if lhs.shape[1] != rhs.shape[1]:
        raise ArgumentError(
            f"lhs [m, k] and rhs [groups, k, n] must have the same k; got {type_text(lhs)} and {type_text(rhs)}."
        )
    recipe = _recipe(dtype, gradient_dtype, accumulation, implementation)
    if is_array(block) or block not in (None, BLOCK):
        raise ArgumentError(f"block must be {BLOCK} or None; got {block!r}.")
    check_sizes(group_sizes, rhs.shape[0])
    check_values(group_sizes=group_sizes)
    layer = _blocked_groups if block else _grouped
    return layer(recipe, _of_floats("lhs", lhs), _of_floats("rhs", rhs), int32(group_sizes))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """The options of a layer.

    Attributes:
        dtype: That of operands.
        gradient_dtype: That of the result's gradient.
        options: Those of the matmuls.
    """

    dtype: str
    gradient_dtype: str
    options: tuple[tuple[str, Any], ...]

    def product(self, x: Quantized, w: Quantized, dtype: Any) -> jax.Array:
        """Return the matmul of `[m, k]` and `[n, k]`."""
        return quantized_matmul(x, w, transpose_w=True, preferred_element_type=dtype, **dict(self.options))

    def groups(self, lhs: Quantized, rhs: Quantized, sizes: jax.Array, dtype: Any) -> jax.Array:
        """Return the matmul of groups, with matrices `[groups, n, k]`."""
        return grouped_matmul(lhs, rhs, sizes, transpose_rhs=True, preferred_element_type=dtype, **dict(self.options))


def _recipe(dtype: Any, gradient_dtype: Any, accumulation: Any, implementation: Any) -> _Recipe:
    named = implementation is None or isinstance(implementation, str)
    if not named and not isinstance(implementation, Sequence):
        raise ArgumentError(f"implementation must be a name, several names or None; got {implementation!r}.")
    if not isinstance(accumulation, str):
        raise ArgumentError(f"accumulation must be 'exact' or 'fast'; got {accumulation!r}.")
    options = {"accumulation": accumulation, "implementation": implementation if named else tuple(implementation)}
    return _Recipe(
        dtype=canonical_dtype("dtype", dtype, tuple(LARGEST)),
        gradient_dtype=canonical_dtype("gradient_dtype", gradient_dtype, tuple(LARGEST)),
        options=tuple(options.items()),
    )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Type:
    """The type that the gradient of an array must have; a residual without numbers.

    Attributes:
        aval: The array's type, with its sharding over explicit mesh axes.
    """

    aval: Any

    @classmethod
    def of(cls, array: jax.Array) -> _Type:
        """Return the type of an array."""
        return cls(jax.typeof(array))

    @property
    def dtype(self) -> Any:
        """The dtype of the array."""
        return self.aval.dtype

    def of_gradient(self, gradient: jax.Array) -> jax.Array:
        """Return the gradient in the array's type."""
        found: jax.Array = compat.partitioning.as_gradient_of(self.aval, gradient)
        return found


def _check_scaling(scaling: Any) -> None:
    """Raise an `ArgumentError` unless the argument is a history, of one layer."""
    if not isinstance(scaling, DelayedScaling):
        raise ArgumentError(f"scaling must be DelayedScaling or None, got {scaling!r}; use DelayedScaling.start().")
    parts = {field.name: getattr(scaling, field.name) for field in dataclasses.fields(scaling)}
    for name, part in parts.items():
        if not is_array(part) or part.dtype != jnp.float32 or len(part.shape) != 1 or not part.shape[0]:
            raise ArgumentError(
                f"scaling.{name} must be a float32 vector of one or more steps, got {type_text(part)}; use "
                "DelayedScaling.start(), and scan or index stacked histories of several layers."
            )


def _of_floats(name: str, array: Any) -> jax.Array:
    """Return an argument as a JAX array of a supported dtype."""
    check_values(**{name: array})
    found = jnp.asarray(array)
    if str(found.dtype) not in OUTPUTS:
        raise ArgumentError(f"{name} must be in {', '.join(OUTPUTS)}; got {type_text(found)}. Cast it.")
    return by_gradients(found)


def _merging(x: Any) -> Merging:
    """Return how the leading axes of `x`, and so of its product, become rows."""
    return Merging.of(x, len(x.shape) - 1)


# Current scaling.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dense(recipe: _Recipe, x: jax.Array, w: jax.Array) -> jax.Array:
    return recipe.product(quantize(x, dtype=recipe.dtype), quantize(w.T, dtype=recipe.dtype), x.dtype)


@once
def _dense_forward(recipe: _Recipe, x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    return _dense(recipe, x, w), (x, w)


@once
def _dense_backward(recipe: _Recipe, residuals: Any, dout: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    dx = recipe.product(quantize(dout, dtype=recipe.gradient_dtype), quantize(w, dtype=recipe.dtype), x.dtype)
    rows = _merging(x)
    columns = quantize(rows.merge("x", x).T, dtype=recipe.dtype)
    gradients = quantize(rows.merge("the gradient", dout).T, dtype=recipe.gradient_dtype)
    return _Type.of(x).of_gradient(dx), _Type.of(w).of_gradient(recipe.product(columns, gradients, w.dtype))


_dense.defvjp(_dense_forward, _dense_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(recipe: _Recipe, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    matrices = quantize(rhs.swapaxes(1, 2), dtype=recipe.dtype)
    return recipe.groups(quantize(lhs, dtype=recipe.dtype), matrices, sizes, lhs.dtype)


@once
def _grouped_forward(recipe: _Recipe, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Any]:
    return _grouped(recipe, lhs, rhs, sizes), (lhs, rhs, sizes)


@once
def _grouped_backward(recipe: _Recipe, residuals: Any, dout: jax.Array) -> tuple[Any, ...]:
    lhs, rhs, sizes = residuals
    rows, matrices = quantize(dout, dtype=recipe.gradient_dtype), quantize(rhs, dtype=recipe.dtype)
    dlhs, drhs = recipe.groups(rows, matrices, sizes, lhs.dtype), grouped_matmul_wgrad(lhs, dout, sizes)
    return _Type.of(lhs).of_gradient(dlhs), _Type.of(rhs).of_gradient(drhs), None


_grouped.defvjp(_grouped_forward, _grouped_backward)


# Blocks.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(recipe: _Recipe, x: jax.Array, w: jax.Array) -> jax.Array:
    return recipe.product(quantize(x, dtype=recipe.dtype, block=BLOCK), _squares(recipe, w), x.dtype)


@once
def _blocked_forward(recipe: _Recipe, x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    merging = _merging(x)
    (rows, columns), squares = quantize_both(merging.merge("x", x), dtype=recipe.dtype), _squares(recipe, w)
    out = merging.separate(recipe.product(rows, squares, x.dtype))
    return out, (columns, squares, _Type.of(x), _Type.of(w))


@once
def _blocked_backward(recipe: _Recipe, residuals: Any, dout: jax.Array) -> tuple[jax.Array, jax.Array]:
    columns, squares, x, w = residuals
    merging = _merging(x.aval)
    rows, gradients = quantize_both(merging.merge("the gradient", dout), dtype=recipe.gradient_dtype, square=True)
    dx = merging.separate(recipe.product(rows, _turned_squares(squares), x.dtype))
    return x.of_gradient(dx), w.of_gradient(recipe.product(columns, gradients, w.dtype))


_blocked.defvjp(_blocked_forward, _blocked_backward)


def _squares(recipe: _Recipe, w: jax.Array) -> Quantized:
    """Return matrices as `[..., n, k]` in blocks of 128x128."""
    return quantize(w.mT, dtype=recipe.dtype, block=BLOCK, axis=(-2, -1))


def _turned_squares(squares: Quantized) -> Quantized:
    return Quantized(squares.values.mT, squares.scale.mT, squares.block)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked_groups(recipe: _Recipe, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    rows = quantize(lhs, dtype=recipe.dtype, block=BLOCK)
    return recipe.groups(rows, _squares(recipe, rhs), sizes, lhs.dtype)


@once
def _blocked_groups_forward(recipe: _Recipe, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> tuple[Any, Any]:
    (rows, columns), squares = quantize_both(lhs, sizes, dtype=recipe.dtype), _squares(recipe, rhs)
    return recipe.groups(rows, squares, sizes, lhs.dtype), (columns, squares, sizes, _Type.of(lhs), _Type.of(rhs))


@once
def _blocked_groups_backward(recipe: _Recipe, residuals: Any, dout: jax.Array) -> tuple[Any, ...]:
    columns, squares, sizes, lhs, rhs = residuals
    rows, gradients = quantize_both(dout, sizes, dtype=recipe.gradient_dtype, square=True)
    dlhs = recipe.groups(rows, _turned_squares(squares), sizes, lhs.dtype)
    asked = {"implementation": dict(recipe.options)["implementation"], "preferred_element_type": rhs.dtype}
    return lhs.of_gradient(dlhs), rhs.of_gradient(grouped_matmul_wgrad(columns, gradients, sizes, **asked)), None


_blocked_groups.defvjp(_blocked_groups_forward, _blocked_groups_backward)


# Delayed scaling.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _delayed(recipe: _Recipe, x: jax.Array, w: jax.Array, scaling: DelayedScaling) -> jax.Array:
    return _delayed_forward(recipe, x, w, scaling)[0]


def _delayed_forward(
    recipe: _Recipe, x: jax.Array, w: jax.Array, scaling: DelayedScaling
) -> tuple[jax.Array, tuple[Any, ...]]:
    x8, w8 = _by_history(x, scaling.x, recipe.dtype), _by_history(w, scaling.w, recipe.dtype)
    following = DelayedScaling(_added(scaling.x, x), _added(scaling.w, w), scaling.gradient)
    return recipe.product(x8, _turned(w8, _merging(w)), x.dtype), (x8, w8, following, (_Type.of(x), _Type.of(w)))


@once
def _delayed_backward(recipe: _Recipe, residuals: tuple[Any, ...], dout: jax.Array) -> tuple[Any, ...]:
    x8, w8, following, (x, w) = residuals
    gradient = _by_history(dout, following.gradient, recipe.gradient_dtype)
    dx = recipe.product(gradient, w8, x.dtype)
    merging = _merging(x.aval)
    dw = recipe.product(_turned(x8, merging), _turned(gradient, merging), w.dtype)
    return (
        x.of_gradient(dx),
        w.of_gradient(dw),
        dataclasses.replace(following, gradient=_added(following.gradient, dout)),
    )


_delayed.defvjp(once(_delayed_forward), _delayed_backward)


def _turned(array: Quantized, merging: Merging) -> Quantized:
    """Return the transpose of a matrix, or of rows with their leading axes as one, with one scale."""
    return Quantized(merging.merge("x", array.values).T, array.scale.reshape(1, 1), (None, None))


def _largest(x: jax.Array, history: jax.Array) -> jax.Array:
    """Return the largest magnitude, over all devices of a `shard_map` that share the history."""
    found: jax.Array = jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)
    axes = compat.tracing.varying_axes(found) - compat.tracing.varying_axes(history)
    return jax.lax.pmax(found, tuple(sorted(axes))) if axes else found


def _by_history(x: jax.Array, history: jax.Array, dtype: str) -> Quantized:
    """Return `x` scaled by the largest magnitude of its history; by its own if the history is empty."""
    known = jnp.max(history)
    largest = jax.lax.cond(known > 0, lambda: known, lambda: compat.tracing.match_varying(known, _largest(x, history)))
    return quantize_by(x, largest, dtype)


def _added(history: jax.Array, x: jax.Array) -> jax.Array:
    """Return the history with the magnitude of `x` first; one that is not finite counts as none."""
    largest = _largest(x, history)
    latest = jnp.where(jnp.isfinite(largest), largest, 0)
    return jnp.concatenate([latest[None], history[:-1]])
