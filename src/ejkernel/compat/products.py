# SPDX-License-Identifier: Apache-2.0
"""Matrix products of Hopper's tensor cores in Mosaic GPU kernels, as PTX: fewer instructions than JAX's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

_NAMES = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
_UNIT = 16  # bytes: the unit of addresses of shared memory in instructions
_ROW = 128 // _UNIT  # units of a row
_INSTRUCTION = 32  # numbers of a row that an instruction takes
# The upper half of a matrix descriptor: a swizzle of 128 bytes, and the units from 8 rows to the next 8. The lower half
# is the address.
_SWIZZLED = 1 << 30 | 8 * _ROW


def start_product(left: Any, right: Any, at: tuple[Any, Any], shape: tuple[int, int], used: Any = None) -> Any:
    """Start the product of rows of `left` by rows of `right`, of 8-bit floats, in a Mosaic GPU kernel.

    The result is valid once no products are pending. JAX's product takes more instructions, one after another, before
    the tensor cores start.

    Args:
        left, right: Shared memory, `[..., 128]`, as `_hopper.launch.tiled` returns it.
        at: The first row of each, counted over all axes but the last; a multiple of 8.
        shape: The number of rows of each: 64, and a multiple of 8.
        used: How many numbers of a row may differ from zero. An instruction for 32 others is skipped. `None`: all 128.
    """
    from jax.experimental.mosaic import gpu
    from jax.experimental.mosaic.gpu import utils
    from jax.experimental.pallas import mosaic_gpu
    from jaxlib.mlir import dialects, ir
    from jaxlib.mlir.dialects import llvm, vector

    plgpu: Any = mosaic_gpu
    arith: Any = dialects.arith  # its stubs lack some functions
    count = shape[1] // 2
    numbers = at if used is None else (*at, used)
    text = _start(shape, [str(jnp.dtype(each.dtype)) for each in (left, right)], skips=used is not None)

    def start(context: Any, left: Any, right: Any, *numbers: Any) -> Any:
        del context
        word, single = ir.IntegerType.get_signless(32), ir.F32Type.get()
        numbers = tuple(x.registers.item() if isinstance(x, gpu.FragmentedArray) else x for x in numbers)

        def address(memory: Any, row: Any) -> Any:
            first = arith.shrui(llvm.ptrtoint(word, utils.memref_ptr(memory)), utils.c(_UNIT.bit_length() - 1, word))
            return arith.addi(first, arith.muli(row, utils.c(_ROW, word)))

        operands = [*map(address, (left, right), numbers), *numbers[2:]]
        kind = llvm.StructType.get_literal([single] * count)
        constraints = ",".join(["=f"] * count + ["r"] * len(operands))
        made: Any = llvm.inline_asm(kind, operands, text, constraints, has_side_effects=True)
        sums = [llvm.extractvalue(single, made, [i]) for i in range(count)]
        pairs = [vector.from_elements(ir.VectorType.get((2,), single), sums[i : i + 2]) for i in range(0, count, 2)]
        registers = np.array(pairs, object).reshape(gpu.WGMMA_LAYOUT.registers_shape(shape))
        return gpu.FragmentedArray(_registers=registers, _layout=gpu.WGMMA_LAYOUT, _is_signed=None)

    tiled = plgpu.RefType((plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128)))
    result = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA)
    types = (tiled, tiled, *[plgpu.Layout.WG_SPLAT(())] * len(numbers))
    return plgpu.inline_mgpu(arg_types=types, return_type=result)(start)(left, right, *numbers)


def _start(shape: tuple[int, int], dtypes: Sequence[str], *, skips: bool) -> str:
    """Return PTX that starts a product; its operands are both addresses and, if it skips instructions, `used`."""
    count = shape[1] // 2
    sums, kinds = ", ".join(f"${i}" for i in range(count)), ".".join(_NAMES[dtype] for dtype in dtypes)
    multiply = f"wgmma.mma_async.sync.aligned.m{shape[0]}n{shape[1]}k{_INSTRUCTION}.f32.{kinds}"
    lines = [".reg .pred adds, is_used; .reg .b32 x, y; .reg .b64 a, b;", "wgmma.fence.sync.aligned;"]
    for number in range(0, 128, _INSTRUCTION):
        lines.append(f"setp.{'eq' if number else 'ne'}.b32 adds, 0, 0;")  # the first one ignores former sums
        for low, descriptor, operand in (("x", "a", count), ("y", "b", count + 1)):
            lines.append(f"add.s32 {low}, ${operand}, {number // _UNIT}; mov.b64 {descriptor}, {{{low}, {_SWIZZLED}}};")
        if skips and number:
            lines.append(f"setp.gt.s32 is_used, ${count + 2}, {number}; @is_used")
        lines.append(f"{multiply} {{{sums}}}, a, b, adds, 1, 1;")
    return f"{{ {' '.join(lines)} wgmma.commit_group.sync.aligned; }}"
