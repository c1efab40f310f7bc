# SPDX-License-Identifier: Apache-2.0
"""JAX's own kernels: cuDNN's fused attention, through the primitives that `jax.nn` binds, and those in Pallas."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.compat.launches import KernelMemory, launched, unchecked
from ejkernel.compat.programs import is_partitioned


class CudnnLengths(NamedTuple):
    """Lengths of queries and keys, as int32 arrays.

    Attributes:
        queries: `[batch]`; with offsets `[batch, segments]`, padded with -1.
        keys: The same for keys.
        offsets: `[batch, segments + 1]`, the start of each segment in both queries and keys, padded with -1.
    """

    queries: Any
    keys: Any
    offsets: Any = None


def cudnn_attention_forward(
    query: Any,
    key: Any,
    value: Any,
    bias: Any | None,
    *,
    scale: float,
    causal: bool,
    window: int,
    lengths: CudnnLengths | None = None,
    with_lse: bool = True,
) -> tuple[Any, ...]:
    """Run cuDNN's fused attention and return its output and the float32 log-sum-exp `[batch, heads, queries]`.

    This binds the primitives below `jax.nn.dot_product_attention`, which rounds the log-sum-exp to the output's dtype
    and cannot pass it to a custom backward.

    Args:
        query, key, value: `[batch, length, heads, head_dim]`.
        bias: `[batch or 1, heads or 1, queries, keys]`, of the query's dtype.
        scale: Factor on the product of query and key.
        causal: Mask later keys; the first query is aligned with the first key.
        window: The number of keys that a query sees, itself included; 0 means all. Requires `causal`.
        lengths: Positions past the lengths are not computed, and their results are uninitialised. With offsets, the
            log-sum-exp is `[batch * segments, heads, queries]`, each segment starting at its own first query.
        with_lse: Whether to return the log-sum-exp; without it cuDNN uses a kernel that does not write it.
    """
    static = _cudnn_parameters(scale, causal, window, (bias is not None, False), lengths) | {"is_training": with_lse}
    return tuple(_call_cudnn_attention("fwd", _cudnn_operands(query, key, value, bias, lengths), static))


def cudnn_attention_backward(
    operands: tuple[Any, Any, Any, Any | None],
    residuals: tuple[Any, Any],
    dout: Any,
    *,
    scale: float,
    causal: bool,
    window: int,
    bias_gradient: bool,
    lengths: CudnnLengths | None = None,
) -> tuple[Any, ...]:
    """Return cuDNN's gradients of query, key, value and, with `bias_gradient`, bias.

    Args:
        operands: Query, key, value and bias, as `cudnn_attention_forward` takes them.
        residuals: The output and log-sum-exp of the forward.
        dout: The cotangent of the output.
        scale, causal, window, lengths: As in the forward.
        bias_gradient: Whether to return the gradient of the bias, summed over its broadcast axes.
    """
    static = _cudnn_parameters(scale, causal, window, (operands[3] is not None, bias_gradient), lengths)
    out, stats = residuals
    return tuple(_call_cudnn_attention("bwd", (*_cudnn_operands(*operands, lengths), stats, out, dout), static))


def _cudnn_operands(
    query: Any, key: Any, value: Any, bias: Any | None, lengths: CudnnLengths | None
) -> tuple[Any, ...]:
    optional = [
        bias,
        *([None] * 4 if lengths is None else [*lengths[:2], lengths.offsets, lengths.offsets]),
        None,
        None,
    ]
    absent = jnp.zeros(0, query.dtype)  # in place of each omitted operand of the seven optional ones
    return (query, key, value, *(absent if x is None else x for x in optional))


def _cudnn_parameters(
    scale: float, causal: bool, window: int, biases: tuple[bool, bool], lengths: CudnnLengths | None
) -> dict[str, Any]:
    from jax._src.cudnn import fused_attention_stablehlo as module

    masks = ("NO_MASK", "CAUSAL") if lengths is None else ("PADDING", "PADDING_CAUSAL")
    return {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": biases,
        "mask_type": module.MaskType[masks[causal]],
        "layout": module.AttentionLayout.BTNH.value,
        "sliding_window_length": window or None,
    }


def _call_cudnn_attention(direction: str, arrays: tuple[Any, ...], static: dict[str, Any]) -> Any:
    from jax._src.cudnn import fused_attention_stablehlo as module

    function = getattr(module, f"_dot_product_attention_{direction}_impl")
    has_score_mod = "score_mod" in inspect.signature(function).parameters  # since JAX 0.12
    if is_partitioned():  # this form tells XLA's partitioner how to shard it
        primitive = getattr(module, f"_dot_product_attention_{direction}_p_wrapper")
        return primitive.bind(*arrays, **static, **({"score_mod": None} if has_score_mod else {}))
    return function(*arrays, **static, **({"score_mod": None, "score_mod_args": ()} if has_score_mod else {}))


_MOSAIC_GPU_SINCE = (0, 11, 2)


def mosaic_gpu_reason() -> str | None:
    """Return why Mosaic GPU kernels cannot be built in this environment, and what to do; `None` if they can.

    Imports nothing.
    """
    if jax.__version_info__ < _MOSAIC_GPU_SINCE:
        return f"it needs JAX {'.'.join(map(str, _MOSAIC_GPU_SINCE))} or later, and this is {jax.__version__}"
    if importlib.util.find_spec("absl") is None:
        return "it needs the package absl-py, which Pallas Mosaic GPU imports: pip install absl-py"
    return None


def store_as_it_is(target: Any, values: Any) -> None:
    """Store registers of a Mosaic GPU kernel with an access pattern that is not optimal.

    Examples are unswizzled shared memory with bank conflicts, and partial sectors of global memory. JAX 0.12 requires
    `optimized=False` for such stores.
    """
    from jax.experimental.pallas import mosaic_gpu

    store: Any = getattr(mosaic_gpu, "store", None)
    if store is None:  # before JAX 0.12
        target[...] = values
    else:
        store(target, values, optimized=False)


# PTX from a register with two pairs to the two first or second numbers, widened; `BYTES` is what prmt selects. An
# integer in the low bits of a large power of two, with its sign flipped, differs from it by a constant.
_WIDEN = {
    # The instruction for float8_e4m3fn has float16 as its only target.
    "float8_e4m3fn": "prmt.b32 pairs, $1, $1, BYTES; mov.b32 {low, high}, pairs; cvt.rn.f16x2.e4m3x2 $0, low;",
    "float8_e5m2": "mov.b32 bias, 0; prmt.b32 $0, $1, bias, BYTES;",  # float16 with fewer digits
    "int8": "xor.b32 pairs, $1, 0x80808080; mov.b32 bias, 0x64646464; prmt.b32 pairs, pairs, bias, BYTES; "
    "mov.b32 bias, 0x64806480; sub.rn.f16x2 $0, pairs, bias;",
}
_BYTES = {
    "float8_e4m3fn": ("0x0020", "0x0031"),
    "float8_e5m2": ("0x2404", "0x3414"),
    "int8": ("0x4240", "0x4341"),
}


# The same for the numbers of one pair after the other: bytes of the low or of the high half. As a bfloat16, an unsigned
# byte is a subnormal multiple of 2**-133, so a fused multiplication and addition makes it signed, divided by 64.
_IN_ORDER = {(dtype, "float16"): text for dtype, text in _WIDEN.items()} | {
    ("float8_e4m3fn", "float16"): "mov.b32 {low, high}, $1; cvt.rn.f16x2.e4m3x2 $0, BYTES;",
    ("int8", "bfloat16"): "xor.b32 pairs, $1, 0x80808080; mov.b32 bias, 0; prmt.b32 pairs, pairs, bias, BYTES; "
    "mov.b32 bias, 0x7f007f00; mov.b32 last, 0xc000c000; fma.rn.bf16x2 $0, pairs, bias, last;",
}
_HALVES = {
    "float8_e4m3fn": ("low", "high"),
    "float8_e5m2": ("0x1404", "0x3424"),
    "int8": ("0x4140", "0x4342"),
}


def widened_in_order(pairs: Any, dtype: str, wide: str) -> tuple[Any, Any]:
    """Return the numbers of the even and of the odd pairs of 8 bits, in 16 bits, in a Mosaic GPU kernel.

    It takes fewer instructions than `widened_pairs`.

    Args:
        pairs, dtype: As for `widened_pairs`.
        wide: The dtype of the results: float16 or, for int8 divided by 64, bfloat16.
    """
    return _widened(pairs, wide, _IN_ORDER[dtype, wide], _HALVES[dtype])


def widened_pairs(pairs: Any, dtype: str) -> tuple[Any, Any]:
    """Return the first and the second numbers of pairs of 8 bits, in float16, in a Mosaic GPU kernel.

    Args:
        pairs: int16, in the layout of a product's result; that of the results.
        dtype: The dtype of the numbers.
    """
    return _widened(pairs, "float16", _WIDEN[dtype], _BYTES[dtype])


def _widened(pairs: Any, wide: str, text: str, selected: tuple[str, str]) -> tuple[Any, Any]:
    """Return the results of PTX on each register, with either selection in place of `BYTES`."""
    from jax.experimental.mosaic.gpu import utils
    from jax.experimental.pallas import mosaic_gpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    plgpu: Any = mosaic_gpu  # as in `_hopper.launch`
    layout = plgpu.Layout.WGMMA
    half = plgpu.ShapeDtypeStruct(pairs.shape, jnp.dtype(wide), layout=layout)

    def widened(register: Any, own: str) -> Any:
        word = ir.IntegerType.get_signless(32)
        body = f"{{ .reg .b32 pairs, bias, last; .reg .b16 low, high; {text.replace('BYTES', own)} }}"
        made: Any = llvm.inline_asm(word, [utils.bitcast(register, word)], body, "=r,r")  # its type differs by version
        number = ir.F16Type.get() if wide == "float16" else ir.BF16Type.get()
        return utils.bitcast(made, ir.VectorType.get((2,), number))

    def split(context: Any, pairs: Any) -> tuple[Any, ...]:
        del context
        return tuple(_with_registers(pairs, functools.partial(widened, own=own)) for own in selected)

    first, second = plgpu.inline_mgpu(arg_types=(layout,), return_type=(half, half))(split)(pairs)
    return first, second


def widened_bfloat16(array: Any) -> Any:
    """Return a bfloat16 matrix in float32, in a Mosaic GPU kernel, with one instruction for each number.

    Args:
        array: In the layout of a product's result.
    """
    from jax.experimental.mosaic.gpu import utils
    from jax.experimental.pallas import mosaic_gpu
    from jaxlib.mlir import dialects, ir
    from jaxlib.mlir.dialects import vector

    plgpu: Any = mosaic_gpu
    arith: Any = dialects.arith  # its stubs lack the values of constants
    layout = plgpu.Layout.WGMMA
    wide = plgpu.ShapeDtypeStruct(array.shape, jnp.float32, layout=layout)

    def widened(register: Any) -> Any:
        word, single = ir.IntegerType.get_signless(32), ir.F32Type.get()
        both = utils.bitcast(register, word)
        low = arith.shli(both, arith.constant(word, 16))
        high = arith.andi(both, arith.constant(word, -(2**16)))
        return vector.from_elements(ir.VectorType.get((2,), single), [utils.bitcast(x, single) for x in (low, high)])

    def convert(context: Any, array: Any) -> Any:
        del context
        return _with_registers(array, widened)

    return plgpu.inline_mgpu(arg_types=(layout,), return_type=wide)(convert)(array)


def _with_registers(array: Any, change: Callable[[Any], Any]) -> Any:
    """Return an array of Mosaic GPU with each register changed, in the same layout."""
    from jax.experimental.mosaic import gpu

    registers = np.empty_like(array.registers)
    for index, register in np.ndenumerate(array.registers):
        registers[index] = change(register)
    return gpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)


def uniform(number: Any) -> Any:
    """Return an int32 number, the same in all threads of a warp, in a uniform register of a Mosaic GPU kernel.

    Without it ptxas may not see that the number is the same, and keeps what depends on it in registers of each thread.
    """
    from jax.experimental.mosaic import gpu
    from jax.experimental.pallas import mosaic_gpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    plgpu: Any = mosaic_gpu
    layout = plgpu.Layout.WG_SPLAT(())

    def reduce(context: Any, number: Any) -> Any:
        del context
        own = number.registers.item() if isinstance(number, gpu.FragmentedArray) else number
        # The result of this instruction is a uniform register.
        word, text = ir.IntegerType.get_signless(32), "redux.sync.min.s32 $0, $1, 0xffffffff;"
        shared: Any = llvm.inline_asm(word, [own], text, "=r,r", has_side_effects=False)  # its type differs by version
        return gpu.FragmentedArray.splat(shared, (), is_signed=True)

    made = plgpu.ShapeDtypeStruct((), jnp.int32, layout=layout)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=made)(reduce)(number)


def ragged_dot_mgpu(lhs: Any, rhs: Any, group_sizes: Any, **layout: Any) -> Any:
    """Return the grouped product of JAX's Hopper kernel; rows past the last group are uninitialised."""
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu as module

    return module.ragged_dot(lhs, rhs, group_sizes=group_sizes, **layout)


def megablox_product(lhs: Any, rhs: Any, sizes: Any, *, dtype: str, memory: KernelMemory, **options: Any) -> Any:
    """Return the grouped product of JAX's TPU kernel; rows outside every group are uninitialised.

    Args:
        lhs, rhs: The operands, varying over the same axes under `shard_map`.
        sizes: int32; the number of rows before the first matrix's group, then the rows of each group.
        dtype: The dtype of the result.
        memory: The limit on vector memory, and where the arrays are.
        **options: `tiling`, whose rows must divide the number of rows; `transpose_rhs` and `interpret`.
    """
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    return _megablox(gmm, (lhs, rhs, sizes), memory, preferred_element_type=jnp.dtype(dtype), **options)


def megablox_weights_gradient(
    lhs: Any, rhs: Any, sizes: Any, *, count: int, dtype: str, memory: KernelMemory, **options: Any
) -> Any:
    """Return the weight gradient of each of `count` groups from JAX's TPU kernel; see `megablox_product`."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    options |= {"preferred_element_type": jnp.dtype(dtype), "num_actual_groups": count}
    return _megablox(tgmm, (lhs.swapaxes(0, 1), rhs, sizes), memory, **options)


def _megablox(kernel: Any, args: tuple[Any, Any, Any], memory: KernelMemory, **options: Any) -> Any:
    run = functools.partial(inspect.unwrap(kernel), group_offset=jnp.int32(1), **options)
    return unchecked(lambda: launched(run, args, memory), args[0])


def tpu_ragged_paged_attention(
    q: Any,
    kv_pages: Any,
    kv_lengths: Any,
    page_table: Any,
    query_offsets: Any,
    count: Any,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    blocks: tuple[int, int],
) -> Any:
    """Return the output of JAX's TPU kernel for paged attention; rows of padding are uninitialised.

    Args:
        q: `[tokens, heads, head_dim]`.
        kv_pages: `[pages, page_size, 2 * kv_heads, head_dim]`; keys and values of each head alternate.
        kv_lengths, page_table, query_offsets: The batch; int32.
        count: `[1]`, the number of sequences; each has a new token.
        scale: Factor on the logits.
        window: The keys that a query sees, its own included.
        soft_cap: Limit of the logits.
        blocks: Pages and queries of a block.
    """
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as module

    pages, queries = blocks
    how: dict[str, Any] = {"sm_scale": scale, "sliding_window": window, "soft_cap": soft_cap}
    how |= {"num_kv_pages_per_block": pages, "num_queries_per_block": queries}
    run = functools.partial(inspect.unwrap(module.ragged_paged_attention), **how)
    args = (q, kv_pages, kv_lengths, page_table, query_offsets, count)
    return unchecked(lambda: launched(run, args, KernelMemory(None, in_hbm=True)), q)


def tuned_ragged_blocks() -> Iterator[tuple[str, tuple[Any, ...], tuple[int, int]]]:
    """Yield device, sizes, and the pages and queries of a block from JAX's table for `tpu_ragged_paged_attention`."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import tuned_block_sizes

    devices = {"TPU v5": ("tpu:tpu_v5_lite", "tpu:tpu_v5"), "TPU v6": ("tpu:tpu_v6_lite",)}
    for chip, blocks in tuned_block_sizes.TUNED_BLOCK_SIZES.items():
        for device in devices.get(chip, ()):
            yield from ((device, sizes, found) for sizes, found in blocks.items())
