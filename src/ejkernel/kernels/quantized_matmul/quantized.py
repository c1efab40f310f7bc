# SPDX-License-Identifier: Apache-2.0
"""`Quantized`: 8-bit numbers with scales, and plain JAX that makes them.

A scale is a factor, `x = values * scale`, of a block of elements. Blocks are cut from the start of each axis; the last
one may be shorter. The scales form an array of the same rank, with an entry per block.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ejkernel import compat
from ejkernel.kernels._numbers import accumulator, is_integer
from ejkernel.kernels._options import check_values, type_text
from ejkernel.ops.core.sharding.rule import WHOLE_BLOCKS
from ejkernel.ops.core.sharding.split import mesh_axes
from ejkernel.ops.errors import ArgumentError, CallError, UnsupportedError
from ejkernel.ops.utils.error_text import value_text
from ejkernel.ops.utils.values.scalars import Takes, python_numbers
from ejkernel.ops.utils.values.signature import is_array, is_known

Block = tuple[int | None, ...]
LARGEST: Final = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}  # the values quantised numbers reach
_MANTISSA: Final = {"float8_e4m3fn": (3, -6), "float8_e5m2": (2, -14)}  # stored bits, and the least normal exponent
_KEYS: Final = {(2,): "threefry2x32", (4,): "rbg"}  # generators of old-style keys, by shape
SCALE_DTYPES: Final = ("float32", "bfloat16")


def _no_operator(symbol: str) -> Callable[..., NoReturn]:
    """Return the method of an operator; it raises an error with the alternative."""
    how = "use quantized_matmul(x, w) from ejkernel.modules; " if symbol == "@" else ""

    def operator(*_: object) -> NoReturn:
        raise CallError(f"Quantized has no operator {symbol}: {how}dequantize() returns an array.")

    return operator


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class Quantized:
    """8-bit numbers with a scale for each block: `dequantize()` is `values * scale`.

    A pytree with two leaves, so it passes through `jit`, `vmap`, `scan`, `jax.export` and checkpoints. Made of two
    arrays, it checks their dtypes and shapes; leaves may be anything else, e.g. shardings.

    Attributes:
        values: Numbers in `float8_e4m3fn`, `float8_e5m2` or `int8`.
        scale: float32 or bfloat16, of the same rank, with `ceil(size / block)` entries along each axis.
        block: The size of a block along each of the last axes; `None` is the whole axis. Axes before these, such as
            those that `jax.vmap` or stacking adds, have a scale for each entry. Axes that indexing, `jax.vmap` or
            `scan` takes away must have blocks of 1.
    """

    values: jax.Array
    scale: jax.Array
    block: Block

    __array_ufunc__ = None  # NumPy leaves operators to these
    __matmul__ = __rmatmul__ = _no_operator("@")
    __mul__ = __rmul__ = _no_operator("*")
    __truediv__ = __rtruediv__ = _no_operator("/")
    __add__ = __radd__ = _no_operator("+")
    __sub__ = __rsub__ = __neg__ = _no_operator("-")

    def __post_init__(self) -> None:
        if is_array(self.values) and is_array(self.scale):
            _check_parts("", self)

    def __repr__(self) -> str:
        leaves = (self.values, self.scale)
        values, scale = (f"{leaf.dtype}{list(leaf.shape)}" if is_array(leaf) else repr(leaf) for leaf in leaves)
        return f"Quantized(values={values}, scale={scale}, block={self.block})"

    def tree_flatten_with_keys(self) -> tuple[Any, Block]:
        """Return the leaves with their names, and the blocks."""
        key = jax.tree_util.GetAttrKey
        return ((key("values"), self.values), (key("scale"), self.scale)), self.block

    def tree_flatten(self) -> tuple[Any, Block]:
        """Return the leaves, and the blocks."""
        return (self.values, self.scale), self.block

    @classmethod
    def tree_unflatten(cls, block: Block, leaves: Iterable[Any]) -> Quantized:
        """Return the object with these leaves, which may be anything."""
        found = object.__new__(cls)
        for name, value in zip(("values", "scale", "block"), (*leaves, block), strict=True):
            object.__setattr__(found, name, value)
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers."""
        return tuple(self.values.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the numbers."""
        return self.values.dtype

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """Return `values * scale`, multiplied in float32 and rounded to `dtype`.

        Raises:
            ArgumentError: `dtype` is no floating-point dtype.
        """
        check_quantized("the array", self)
        if not _is_floating(dtype):
            raise ArgumentError(f"dtype must be a floating-point dtype, e.g. 'bfloat16'; got {dtype!r}.")
        wide = self.values.astype(jnp.float32)
        return (wide * spread(self.scale.astype(jnp.float32), self.shape, self.block)).astype(dtype)

    def to_qwix(self) -> Any:
        """Return a `qwix.QArray`; every size must be a multiple of its block.

        Raises:
            ArgumentError: A last block is shorter than the others, which Qwix cannot say.
            ImportError: Qwix is not installed.
        """
        import qwix

        check_quantized("the array", self)
        for size, block in zip(self.shape, full_block(self.block, len(self.shape)), strict=True):
            if block is not None and size % block:
                raise ArgumentError(f"block must divide the shape for Qwix; got {self.block} for shape {self.shape}.")
        return qwix.QArray(self.values, self.scale)

    @classmethod
    def from_qwix(cls, array: Any) -> Quantized:
        """Return the numbers and scales of a `qwix.QArray` without a zero point.

        Raises:
            ArgumentError: `array` is no `qwix.QArray`, or has a zero point or scales that do not fit.
        """
        if not hasattr(array, "qvalue") or not hasattr(array, "scale"):
            raise ArgumentError(f"array must be a qwix.QArray, with qvalue and scale; got {type_text(array)}.")
        if getattr(array, "zero_point", None) is not None:
            raise ArgumentError("zero_point must be None: scales here are factors alone; quantise symmetrically.")
        return given_scale("qvalue", array.qvalue, array.scale)


compat.programs.register_for_export(Quantized, "ejkernel.Quantized", json.dumps, lambda text: tuple(json.loads(text)))


def quantize(
    x: jax.Array,
    *,
    dtype: DTypeLike = "float8_e4m3fn",
    block: int | Sequence[int | None] | None = None,
    axis: int | Sequence[int] | None = -1,
    scale_dtype: DTypeLike = "float32",
    stochastic: jax.Array | Literal[False] = False,
) -> Quantized:
    """See `ejkernel.modules.quantize`; this is its plain JAX."""
    if not is_array(x) or not jnp.issubdtype(x.dtype, jnp.floating) or jnp.dtype(x.dtype).itemsize < 2:
        raise ArgumentError(f"x must be a floating-point array of 16 bits or more, got {type_text(x)}.")
    name, scales = (
        canonical_dtype("dtype", dtype, tuple(LARGEST)),
        canonical_dtype("scale_dtype", scale_dtype, SCALE_DTYPES),
    )
    blocks = _canonical_block(block, axis, len(x.shape))
    if not (stochastic is False or _is_key(stochastic)):
        raise ArgumentError(
            f"stochastic must be one PRNG key or False, got {value_text(stochastic)}; pass jax.random.key(seed)."
        )
    key = () if stochastic is False else (_typed(stochastic),)
    check_values(x=x)
    x = jnp.asarray(x)
    _check_shards(x, blocks)
    values, scale = _at_once(name, scales, blocks, x, *key)
    return Quantized(values, scale, blocks)


def quantize_by(x: jax.Array, largest: jax.Array, dtype: str) -> Quantized:
    """Return `x` in a float8 dtype, with one scale that maps the magnitude `largest` to the dtype's largest number.

    Larger magnitudes become the largest number; infinity becomes NaN, so that an overflow stays visible.
    """
    wide = x.astype(accumulator(x.dtype))
    top = jnp.asarray(LARGEST[dtype], wide.dtype)
    scale = jnp.maximum(largest.astype(jnp.float32) / LARGEST[dtype], np.finfo(np.float32).tiny)
    ratio = jnp.clip(wide / scale.astype(wide.dtype), -top, top)
    values = jnp.where(jnp.isfinite(wide), ratio, jnp.nan).astype(dtype)
    return Quantized(values, scale.reshape((1,) * x.ndim), (None,) * x.ndim)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _quantized(
    dtype: str, scale_dtype: str, block: Block, x: jax.Array, *key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    wide = x.astype(accumulator(x.dtype))
    top = jnp.asarray(LARGEST[dtype], wide.dtype)
    largest = _largest(wide, block)
    tiny = jnp.asarray(np.finfo(np.float32).tiny, wide.dtype)
    scale = jnp.where(jnp.isfinite(largest), jnp.maximum(largest / top, tiny), jnp.nan).astype(scale_dtype)
    # Divided by the rounded scale, so that its rounding adds no error; a scale rounded down saturates.
    ratio = wide / spread(scale.astype(wide.dtype), x.shape, block)
    ratio = jnp.clip(jnp.where(jnp.isnan(ratio), jnp.zeros_like(ratio), ratio), -top, top)
    if key:
        ratio = _rounded_at_random(ratio, dtype, key[0])
    return (jnp.round(ratio) if dtype == "int8" else ratio).astype(dtype), scale


@_quantized.defjvp
def _no_gradient(*_: Any) -> Any:
    raise UnsupportedError(
        "quantize has no gradient: rounding has none. Use quantized_dense to train, or jax.lax.stop_gradient on x."
    )


# Outside of `jit`, one program instead of one for each operation.
_at_once = jax.jit(_quantized, static_argnums=(0, 1, 2), inline=True)


@jax.custom_jvp
def without_gradient(values: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return both arrays; differentiating them raises."""
    return values, scale


@without_gradient.defjvp
def _no_gradient_of_operands(*_: Any) -> Any:
    raise UnsupportedError(
        "a quantised operand has no gradient: use quantized_dense to train, or jax.lax.stop_gradient on the operand."
    )


def _rounded_at_random(x: jax.Array, dtype: str, key: jax.Array) -> jax.Array:
    """Return each number as one of the two nearest numbers of `dtype`, nearer ones more often."""
    unit = jnp.ones_like(x)
    if dtype in _MANTISSA:
        bits, least = _MANTISSA[dtype]
        exponent = jnp.maximum(jnp.frexp(x)[1] - 1, least) - bits
        unit = jnp.ldexp(unit, exponent)
    top = jnp.asarray(LARGEST[dtype], x.dtype)
    found: jax.Array = jnp.clip(jnp.floor(x / unit + jax.random.uniform(key, x.shape, x.dtype)) * unit, -top, top)
    return found


def _largest(x: jax.Array, block: Block) -> jax.Array:
    """Return the largest magnitude of each block, or NaN if it has NaN."""
    # Magnitudes are ordered like their bits, NaN last; some maxima of floats by XLA for CPUs ignore NaN.
    found = jax.lax.bitcast_convert_type(jnp.abs(x), f"int{8 * x.dtype.itemsize}")
    # One axis at a time: JAX splits no two axes at once that are sharded over explicit mesh axes.
    for axis, (size, b) in enumerate(zip(x.shape, block, strict=True)):
        if b is None:
            found = jnp.max(found, axis, keepdims=True, initial=0)
        elif (within := _within(b, size)) > 1:
            count, padding = -(-size // b), [(0, 0)] * x.ndim
            padding[axis] = (0, count * within - size)
            split = (*found.shape[:axis], count, within, *found.shape[axis + 1 :])
            found = jnp.max(jnp.pad(found, padding).reshape(split), axis + 1)
    return jax.lax.bitcast_convert_type(found, x.dtype)


def _within(block: int, size: Any) -> int:
    """Return the block, at most as long as the axis: the rest would be padding."""
    return min(block, max(size, 1)) if is_known(size) else block


def _check_shards(x: jax.Array, block: Block) -> None:
    """Raise an `ArgumentError` if a block would be cut by the sharding of `x` over explicit mesh axes."""
    aval = jax.typeof(x)
    mesh = compat.tracing.explicit_mesh([aval])
    for axis, entry in enumerate(aval.sharding.spec if mesh is not None else ()):
        shard, b = x.shape[axis] // math.prod(mesh.shape[name] for name in mesh_axes(entry)), block[axis]
        if b is not None and shard < x.shape[axis] and shard % b:
            raise ArgumentError(
                f"axis {axis} of x is sharded over {entry!r} into shards of {shard}, and blocks have {b}: "
                f"{WHOLE_BLOCKS}; use jax.sharding.reshard to shard it otherwise first."
            )


def spread(scale: jax.Array, shape: Sequence[int], block: Block) -> jax.Array:
    """Return scales with an entry for each element, or of length 1 along axes where all elements share one."""
    for axis, (size, b) in enumerate(zip(shape, full_block(block, len(shape)), strict=True)):
        if b not in (None, 1):
            b = _within(b, size)
            # `jnp.repeat` refuses axes sharded over explicit mesh axes.
            wide = jnp.broadcast_to(
                jnp.expand_dims(scale, axis + 1), (*scale.shape[: axis + 1], b, *scale.shape[axis + 1 :])
            )
            scale = wide.reshape(*scale.shape[:axis], scale.shape[axis] * b, *scale.shape[axis + 1 :])
            if scale.shape[axis] != size:
                scale = jax.lax.slice_in_dim(scale, 0, size, axis=axis)
    return scale


def full_block(block: Block, rank: int) -> Block:
    """Return the block with an entry for each axis; axes that `jax.vmap` or indexing took away had 1."""
    return (1,) * (rank - len(block)) + block[max(0, len(block) - rank) :]


def scale_shape(shape: Sequence[Any], block: Block) -> tuple[Any, ...]:
    """Return the shape of the scales of an array."""
    return tuple(
        1 if b is None else size if b == 1 else -(-size // b)
        for size, b in zip(shape, full_block(block, len(shape)), strict=True)
    )


def check_quantized(name: str, array: Quantized) -> None:
    """Raise an `ArgumentError` unless dtypes and shapes fit together."""
    _check_parts(f"{name}.", array)


def _check_parts(prefix: str, array: Quantized) -> None:
    """See `check_quantized`; names of parts begin with `prefix`."""
    values, scale, block = (getattr(array, part) for part in ("values", "scale", "block"))
    if not is_array(values) or str(values.dtype) not in LARGEST:
        raise ArgumentError(f"{prefix}values must have dtype {', '.join(LARGEST)}; got {type_text(values)}.")
    rank = len(values.shape)
    if not isinstance(block, tuple) or not all(map(_is_size, block)) or set(block[: max(0, len(block) - rank)]) - {1}:
        raise ArgumentError(
            f"{prefix}block must be a tuple of positive integers or None, one per axis of {type_text(values)}, after 1 "
            f"for axes that indexing or jax.vmap took away; got {block!r}."
        )
    wanted = scale_shape(values.shape, block)
    if not is_array(scale) or str(scale.dtype) not in SCALE_DTYPES or tuple(scale.shape) != wanted:
        raise ArgumentError(
            f"{prefix}scale must be {' or '.join(SCALE_DTYPES)} of shape {wanted}: blocks {block} of "
            f"{tuple(values.shape)}; got {type_text(scale)}. With several devices {WHOLE_BLOCKS}."
        )


def given_scale(name: str, values: Any, scale: Any, scale_name: str = "scale") -> Quantized:
    """Return numbers with their scales, and the blocks that the shapes tell.

    Args:
        name: The argument of `values`, for messages.
        values: The numbers.
        scale: A number for the whole array, or an array of the same rank whose sizes are 1 or divide those of `values`.
        scale_name: The argument of `scale`, for messages.
    """
    scale = python_numbers(scale, Takes.STATIC)
    if isinstance(scale, int | float) and not isinstance(scale, bool):
        scale = jnp.float32(scale)
    if not is_array(values) or not is_array(scale):
        raise ArgumentError(
            f"{name} must be an array and {scale_name} an array or a number; got {type_text(values)} and "
            f"{type_text(scale)}."
        )
    if str(scale.dtype) not in SCALE_DTYPES:
        raise ArgumentError(
            f"{scale_name} must have dtype {' or '.join(SCALE_DTYPES)}, got {type_text(scale)}; cast it."
        )
    shape = tuple(values.shape)
    if len(scale.shape) == 0:
        scale = scale.reshape((1,) * len(shape))
    pairs = list(zip(shape, scale.shape, strict=False))
    if len(scale.shape) != len(shape) or any(
        entries not in (1, size) and (0 in (size, entries) or size % entries) for size, entries in pairs
    ):
        raise ArgumentError(
            f"{scale_name} must be a number, or have the rank of {name} and sizes that divide {shape}; got "
            f"{type_text(scale)}. With a shorter last block, pass Quantized(values, scale, block)."
        )
    # 1 for an axis of one element, so that `scan` may take it away.
    blocks = (1 if entries == size else None if entries == 1 else size // entries for size, entries in pairs)
    return Quantized(values, scale, tuple(blocks))


def is_quantized(array: Any) -> bool:
    """Return whether an argument is `Quantized` or a `qwix.QArray`."""
    return isinstance(array, Quantized) or hasattr(array, "qvalue")


def quantized_operand(name: str, array: Any, scale: Any = None) -> tuple[Any, Any, Block | None]:
    """Return an operand's numbers, scales and blocks; the last two are `None` for an array.

    Args:
        name: The argument's name, for messages.
        array: `Quantized`, a `qwix.QArray` or an array.
        scale: The argument for scales of an array, to refuse it for numbers that have their own.
    """
    if hasattr(array, "qvalue"):
        array = Quantized.from_qwix(array)
    if not isinstance(array, Quantized):
        return array, None, None
    if scale is not None:
        raise ArgumentError(f"{name}_scale must be None, because {name} is Quantized and has its own scales.")
    check_quantized(name, array)
    values, scale = without_gradient(array.values, array.scale)
    rank = len(values.shape)
    return values, scale, array.block if len(array.block) <= rank else full_block(array.block, rank)


def _is_floating(dtype: Any) -> bool:
    try:
        return not is_array(dtype) and bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False


def canonical_dtype(name: str, dtype: Any, allowed: Sequence[str]) -> str:
    """Return the name of a dtype among `allowed`."""
    try:
        found = "" if is_array(dtype) else str(jnp.dtype(dtype).name)
    except (TypeError, ValueError):
        found = ""
    if found not in allowed:
        raise ArgumentError(f"{name} must be one of {', '.join(allowed)}; got {dtype!r}.")
    return found


def _canonical_block(block: Any, axis: Any, rank: int) -> Block:
    axes = range(rank) if axis is None else (axis,) if is_integer(axis) else axis
    if not isinstance(axes, Sequence) or not all(is_integer(a) and -rank <= a < rank for a in axes):
        raise ArgumentError(f"axis must be axes of x, which has {rank}, or None; got {axis!r}.")
    if not axes and axis is not None:
        raise ArgumentError(f"axis must name an axis along which elements share a scale, or be None; got {axis!r}.")
    numbers = [a % rank for a in axes]
    if len(set(numbers)) < len(numbers):
        raise ArgumentError(f"axis must name each axis once; got {axis!r}.")
    sizes = block if isinstance(block, Sequence) and not isinstance(block, str | bytes) else [block] * len(numbers)
    if len(sizes) != len(numbers) or not all(map(_is_size, sizes)):
        raise ArgumentError(f"block must be a positive integer or None for each axis of {tuple(axes)}; got {block!r}.")
    found: dict[int, Any] = dict(zip(numbers, sizes, strict=True))
    return tuple(None if found.get(a, 1) is None else int(found.get(a, 1)) for a in range(rank))


def _is_key(key: Any) -> bool:
    if not is_array(key):
        return False
    typed = bool(jnp.issubdtype(key.dtype, jax.dtypes.prng_key))
    return tuple(key.shape) == () if typed else key.dtype == np.uint32 and tuple(key.shape) in _KEYS


def _typed(key: Any) -> Any:
    """Return a key of old style, an array of words, as one of new style."""
    words = tuple(key.shape)
    return jax.random.wrap_key_data(key, impl=_KEYS[words]) if words else key


def _is_size(size: Any) -> bool:
    return size is None or (is_integer(size) and is_known(size) and size > 0)
