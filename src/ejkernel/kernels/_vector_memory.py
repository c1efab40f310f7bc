# SPDX-License-Identifier: Apache-2.0
"""The vector memory of kernels for TPUs.

The bytes of windows and scratch arrays follow from the shapes. If they exceed the memory, parameters are invalid.
The compiler also keeps intermediate values in vector memory; how many depends on its schedule. Their estimate is an
upper bound, which a few kernels exceed. By this bound, untuned calls fit and leave a part of the memory free. While
tuning, the compiler decides about other parameters.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any, NamedTuple

from ejkernel import compat
from ejkernel.ops.implementation import OperationCall

from ._alike import Alike, Likeness

LANES = 128  # elements of a vector register's row
REGISTER = 4096  # bytes of a vector register
USUAL_LIMIT = 16 << 20  # bytes that a kernel may take by default
_LONG = 6 << 20  # bytes; operands that take this much or more are in HBM
WIDE_UNITS = ("tpu:tpu_v6_lite", "tpu:tpu7x")  # chips with a matrix unit 256 wide
# The compiler's default limits for other chips.
_LIMITS = {"tpu:tpu_v6_lite": 32 << 20, "tpu:tpu7x": 32 << 20}
_LIKE = {"tpu:tpu_v5": "tpu:tpu_v5_lite"}
# Vector memory of chips, in bytes.
_MEMORY = {
    "tpu:tpu_v5_lite": 128 << 20,
    "tpu:tpu_v6_lite": 128 << 20,
    "tpu:tpu_v5": 64 << 20,
    "tpu:tpu7x": 64 << 20,
}
_FITTED = 320  # the widest heads of the compiled kernels to which weights are fitted
_SCHEDULES = 1.04  # kernels of one form may take this much more, e.g. on a v5p instead of a v5e
_UNTUNED = 27  # 32nds of the memory that untuned calls may take
_LEAST = 16 << 20  # limit and memory of a v4
_UNKNOWN = (
    "every TPU. The chip is unknown; to name it, lower the program for arguments with the sharding of a device of a "
    "topology (jax.experimental.topologies)."
)


class Need(NamedTuple):
    """Bytes of vector memory: a kernel takes at least the former, and by our estimate at most the latter."""

    least: int
    most: int

    def fault(self, limit: int, call: OperationCall) -> str | None:
        """Return why a kernel exceeds a limit; `None` if it may fit."""
        if self.least <= limit:
            return None
        place = "this chip" if call.device_fingerprint else "any TPU"
        return f"it takes at least {self.least} bytes of vector memory, and a kernel may take {limit} on {place}."

    def doubt(self, limit: int, call: OperationCall) -> str | None:
        """Return why a kernel may exceed a limit; `None` if it surely fits."""
        if self.most <= limit:
            return None
        place = "this chip." if call.device_fingerprint else _UNKNOWN
        return f"it may take {self.most} bytes of vector memory, and a kernel may take {limit} on {place}"


class Parts(NamedTuple):
    """The vector memory of a kernel by its causes.

    Attributes:
        least: Bytes that it surely takes.
        known: Bytes without intermediate values.
        kind: The kind of kernel, a key of the weights.
        sizes: Numbers of intermediate 32-bit values; the compiler keeps some of them in vector memory.
        form: The facts that decide the intermediate values outside of loops, a key of the compiled code; empty without
            a chip.
        loop: The same for its loops; empty without loops.
    """

    least: int
    known: int
    kind: str
    sizes: Mapping[str, int]
    form: str = ""
    loop: str = ""

    @property
    def registers(self) -> int | None:
        """The registers that the compiler keeps in memory by the table; `None` if it lacks code of the kernel.

        Loops and branches that follow each other use the same memory.
        """
        whole, outside, loop = (compiled().get(name) for name in (self.whole, self.form, self.loop))
        if whole or not (outside and (loop or not self.loop)):
            return whole[0] if whole else None
        return max(outside[0], outside[1] + loop[0]) if loop else outside[0]

    @property
    def whole(self) -> str:
        """The name of a kernel in the table whose loops were compiled with this code alone."""
        return f"{self.form} with {self.loop}"

    def times(self, share: float) -> Parts:
        """Return the parts of a kernel that keeps `share` times as many intermediate values."""
        return self._replace(sizes={name: math.ceil(size * share) for name, size in self.sizes.items()})

    def need(self, weights: Mapping[str, Mapping[str, float]]) -> Need:
        """Return the lower bound, and the upper estimate: by the table, or the least by code alike and by weights."""
        if self.registers is not None:
            most = int((self.known + REGISTER * self.registers) * _SCHEDULES)
        else:
            most = self.known + int(4 * sum(self.sizes[name] * weight for name, weight in weights[self.kind].items()))
            most = min(most, self._alike() or most)
        return Need(self.least, max(self.least, most))

    def _alike(self) -> int | None:
        """Return the bytes by the table, with code alike in place of code that it lacks; `None` without such code."""
        outside, loop = (alike(name) if name else None for name in (self.form, self.loop))
        if outside is None or (self.loop and loop is None):
            return None
        straight, around = outside.registers
        registers = straight if loop is None else max(straight, around + loop.registers[0])
        return int((self.known + REGISTER * registers) * max(outside.margin, loop.margin if loop else 1))


def compiled() -> dict[str, list[int]]:
    """Return the table of compiled code of attention: the registers that the compiler keeps in memory, by form.

    Loops and whole kernels have one number. Other code has two: all without the loops, and the registers that stay in
    memory during a loop. Written by `python -m benchmarks.memory_tpu_fit`.
    """
    found: dict[str, list[int]] = _tables()["code"]
    return found


def alike(name: str) -> Alike | None:
    """Return the registers of compiled code, or of the code in the table that is most like it; `None` without any."""
    registers = compiled().get(name)
    return _likeness()(name) if registers is None else Alike(tuple(registers), _SCHEDULES)


@functools.cache
def _likeness() -> Likeness:
    return Likeness(compiled(), _tables()["margins"])


def spilled_registers() -> dict[str, dict[str, dict[str, int]]]:
    """Return the registers that kernels of `tpu_ragged` keep in memory, by form, and queries and keys of a block."""
    found: dict[str, dict[str, dict[str, int]]] = _tables()["registers"]
    return found


def spilled_registers_of_tiles() -> dict[str, dict[str, list[int | None]]]:
    """Return the registers that kernels of `megablox` keep in memory, by chip, dtype and kind, and by tile.

    A tile that the compiler refuses has `None`.
    """
    found: dict[str, dict[str, list[int | None]]] = _tables()["tiles"]
    return found


def spilled_registers_of_norms() -> dict[str, dict[str, list[int | None]]]:
    """Return the registers that kernels of row norms keep in memory, by form and columns.

    A number of columns has three: of kernels with several strips of rows, with a single one, and with a part of one.
    """
    found: dict[str, dict[str, list[int | None]]] = _tables()["norms"]
    return found


@functools.cache
def _tables() -> dict[str, Any]:
    file = resources.files("ejkernel") / "data" / "compiled" / "tpu.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def form_of(call: OperationCall, *words: str) -> str:
    """Return the name of a kernel in the table of compiled figures; empty if the chip is not known."""
    return ", ".join(filter(None, (like(call.device_fingerprint), *words))) if call.device_fingerprint else ""


def like(chip: str) -> str:
    """Return a chip for which the compiler keeps the same values in memory."""
    return _LIKE.get(chip, chip)


def with_chips(call: OperationCall, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return sizes, and the same for each chip alone: the compiler keeps different shares of them."""
    own = dict(sizes)
    for chip in ("tpu:tpu_v5_lite", "tpu:tpu_v6_lite", "tpu:tpu_v4", "tpu:tpu7x"):
        own |= {f"{name}, {chip}": size * (call.device_fingerprint == chip) for name, size in sizes.items()}
    return own


def limit_of(call: OperationCall, *, surely: bool = False) -> int:
    """Return the bytes of vector memory that a kernel may take by the compiler's default; see `memory_of`."""
    return _of_chip(call, _LIMITS, surely)


def memory_of(call: OperationCall, *, surely: bool = False) -> int:
    """Return the bytes of a chip's vector memory; a kernel that passes its own limit may take all of it.

    Args:
        call: The call. If its chip is unknown, as in a program exported on another machine, the result is the memory of
            the largest: the compiler refuses kernels that do not fit.
        surely: Whether an unknown chip is the smallest instead, for untuned calls.
    """
    return _of_chip(call, _MEMORY, surely)


def _of_chip(call: OperationCall, sizes: Mapping[str, int], surely: bool) -> int:
    if not call.device_fingerprint:
        # A call without a platform is traced, and its parameters are chosen again when it is lowered.
        return _LEAST if surely and call.platform is not None else max(sizes.values())
    return sizes.get(call.device_fingerprint, _LEAST)


def beyond_fit(*dims: int) -> float:
    """Return the factor on the fitted intermediate values for heads wider than those of the fitted kernels.

    With up to 1,024 dimensions, compiled kernels kept up to 2.4 times as many values as by the fit, except for fused
    gradients and splash attention's forward.
    """
    return 1 + 0.6 * max(max(dims) - _FITTED, 0) / 256


def untuned_of(call: OperationCall) -> int:
    """Return the most bytes by the upper estimate for an untuned call; kernels that take 18 % more still fit."""
    return memory_of(call, surely=True) * _UNTUNED // 32


def usual_of(call: OperationCall) -> int:
    """Return the most bytes for an untuned call of a kernel with the compiler's default limit."""
    return limit_of(call, surely=True) * _UNTUNED // 32


def memory_to_pass(need: Need, arrays: Iterable[Any]) -> compat.launches.KernelMemory:
    """Return the limit on vector memory for a kernel, and whether its arrays are in HBM.

    The limit is twice the estimate, because the estimate may be too low. The compiler accepts a limit above the chip's
    memory, and refuses a kernel that takes more than this memory.

    Long arrays are in HBM, so that the kernel takes the same vector memory in every program. For that, simulated
    attention of 2,048 positions takes 3 to 6 % more cycles. XLA may keep shorter arrays in vector memory: without that,
    a program of 1,024 positions and 8 heads would take 32 to 36 % more.

    Args:
        need: The estimate.
        arrays: The largest operands.
    """
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
    return compat.launches.KernelMemory(max(USUAL_LIMIT, 2 * need.most), in_hbm=size >= _LONG)


def larger(*needs: Need) -> Need:
    """Return the need of a program that runs these kernels one after the other."""
    return Need(max(need.least for need in needs), max(need.most for need in needs))


def up(size: int, unit: int = LANES) -> int:
    """Return `size` rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit
