# SPDX-License-Identifier: Apache-2.0
"""Cycles of a program compiled for a TPU: its schedule, with the compiler's estimate for each kernel.

Google's compiler for TPUs estimates the cycles of each kernel of a program: a fusion, a matrix product, a Pallas
kernel. The program's text lists the kernels in their order. Loops repeat their kernels, and copies between memories run
beside them.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Final

from ejkernel.ops.errors import CandidateError

_COMPUTATION: Final = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION: Final = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*)$")
_OPCODE: Final = re.compile(r" ([a-z][a-z0-9\-]*)\(")
_ARRAY: Final = re.compile(r"([a-z]+)(\d*)[a-z0-9]*\[([\d,]*)\]")
_NAME: Final = re.compile(r"%([\w.\-]+)")
_NOISE: Final = re.compile(r", (metadata|sharding|backend_config|origin)=\{.*")  # the last attributes
# Without a kernel: they name, group or rename values.
_FREE: Final = frozenset({"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all"})
_FREE_CALLS: Final = ("AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast")


@dataclasses.dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    opcode: str
    type: str
    rest: str  # the operands and attributes
    is_root: bool

    @property
    def operands(self) -> list[str]:
        return _NAME.findall(self.rest.partition(")")[0])

    def attribute(self, name: str) -> str:
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
        return match[1] if match is not None else ""

    @property
    def sizes(self) -> list[float]:
        """Bytes of each array of its result; arrays of one element are left out, as scalars are."""
        found = ((math.prod(map(int, dims.split(","))), bits) for _, bits, dims in _ARRAY.findall(self.type) if dims)
        return [count * int(bits or 8) / 8 for count, bits in found if count > 1]


def cycles_of(text: str, kernels: Mapping[str, int], bytes_per_cycle: float) -> float:
    """Return the estimated cycles of a program compiled for a TPU.

    Args:
        text: The compiled program as HLO text, its instructions in the order of execution.
        kernels: The compiler's estimate of cycles for each kernel, by the name of its instruction.
        bytes_per_cycle: Bandwidth of the device's memory, for copies beside the kernels.

    Raises:
        CandidateError: The program has a branch, a loop of unknown length, or a kernel without an estimate.
    """
    return _Schedule(_computations(text), kernels, bytes_per_cycle).run()


def _computations(text: str) -> dict[str, list[_Instruction]]:
    """Return the instructions of each computation; the entry has the name `""`."""
    found: dict[str, list[_Instruction]] = {}
    current: list[_Instruction] = []
    for line in text.splitlines():
        start = _COMPUTATION.match(line)
        if start is not None:
            current = found["" if start[1] else start[2]] = []
            continue
        parts = _INSTRUCTION.match(line)
        opcode = None if parts is None else _OPCODE.search(f" {parts[3]}")
        if parts is not None and opcode is not None:
            kind, rest = parts[3][: max(opcode.start() - 1, 0)], parts[3][opcode.end() - 1 :]
            current.append(_Instruction(parts[2], opcode[1], kind, rest, bool(parts[1])))
    return found


class _Schedule:
    """The walk through a program."""

    def __init__(
        self, computations: Mapping[str, list[_Instruction]], kernels: Mapping[str, int], bytes_per_cycle: float
    ) -> None:
        self._computations = computations
        self._kernels = kernels
        self._bytes_per_cycle = bytes_per_cycle
        self._bodies: dict[str, str] = {}
        # The compiler compiles and estimates equal kernels once.
        self._by_code = {
            self._code(each, inside): kernels[each.name]
            for inside in computations
            for each in computations[inside]
            if each.name in kernels
        }

    def run(self, name: str = "") -> float:
        """Return the cycles of a computation."""
        now = copied = 0.0  # when the kernels and the copies so far end
        ends: dict[str, float] = {}
        for each in self._computations.get(name, []):
            if each.opcode.endswith("-start") and each.opcode != "async-start":  # a copy, or a slice that is copied
                copied = ends[each.name] = max(copied, now) + min(each.sizes, default=0.0) / self._bytes_per_cycle
            elif each.opcode.endswith("-done"):
                now = max(now, *(ends.get(operand, 0.0) for operand in each.operands), 0.0)
            else:
                now += self._cycles(each, name)
        return now

    def _cycles(self, each: _Instruction, inside: str) -> float:
        if each.opcode == "while":
            return self._trips(each, inside) * self.run(each.attribute("body"))
        if each.opcode == "call":
            return self.run(each.attribute("to_apply"))
        if each.opcode == "async-start":
            raise CandidateError(f"the program computes beside its kernels ({each.name})")
        if each.opcode == "conditional":
            raise CandidateError(f"the program branches ({each.name}), so its time depends on its inputs")
        is_free = each.opcode in _FREE or not each.sizes  # scalars are computed beside the kernels
        if is_free or (each.opcode == "custom-call" and any(name in each.rest for name in _FREE_CALLS)):
            return 0.0
        cycles = self._kernels.get(each.name) or self._by_code.get(self._code(each, inside), 0)
        if cycles <= 0:
            raise CandidateError(f"the simulator gives no estimate for {each.name} ({each.opcode})")
        return float(cycles)

    def _code(self, each: _Instruction, inside: str) -> str:
        """Return an instruction without names: with the types of its operands, and its called computations."""
        types = {other.name: other.type for other in self._computations[inside]}
        operands, _, attributes = each.rest.partition(")")
        operands = _NAME.sub(lambda match: types.get(match[1], ""), operands)
        called = _NAME.sub(lambda match: self._body(match[1]), _NOISE.sub("", attributes))
        return f"{each.type} {each.opcode}({operands}){called}"

    def _body(self, name: str) -> str:
        """Return the instructions of a computation, with numbers as names."""
        if name not in self._bodies:
            instructions = self._computations.get(name, [])
            numbers = {each.name: f"%{number}" for number, each in enumerate(instructions)}
            lines = (f"{each.type} {each.opcode}({_NOISE.sub('', each.rest)}" for each in instructions)
            self._bodies[name] = "\n".join(
                _NAME.sub(lambda match: numbers.get(match[1]) or self._body(match[1]), line) for line in lines
            )
        return self._bodies[name]

    def _trips(self, loop: _Instruction, inside: str) -> int:
        """Return how often a loop runs: from a constant, by a constant, while less than a constant.

        Raises:
            CandidateError: It is no such loop.
        """
        condition, body = self._named(loop.attribute("condition")), self._named(loop.attribute("body"))
        try:
            test = next(each for each in condition.values() if each.is_root)
            index, last = (condition[name] for name in test.operands)
            if test.opcode != "compare" or test.attribute("direction") != "LT":
                raise KeyError(test.opcode)
            number = int(index.attribute("index"))
            first = _constant(self._named(inside), self._named(inside)[loop.operands[0]].operands[number])
            step = next(each for each in body.values() if each.is_root).operands[number]
            before, added = body[step].operands
            by = _constant(body, added)
            if body[step].opcode != "add" or by < 1 or _source(body, before).attribute("index") != str(number):
                raise KeyError(step)
            return max(0, -(-(_constant(condition, last.name) - first) // by))
        except (KeyError, ValueError, IndexError, StopIteration):
            raise CandidateError(f"the program has a loop of unknown length ({loop.name})") from None

    def _named(self, computation: str) -> dict[str, _Instruction]:
        return {each.name: each for each in self._computations.get(computation, [])}


def _constant(instructions: Mapping[str, _Instruction], name: str) -> int:
    """Return the value of a constant, maybe copied.

    Raises:
        KeyError: It is no constant.
        ValueError: It is no integer.
    """
    each = _source(instructions, name)
    if each.opcode != "constant":
        raise KeyError(name)
    return int(each.rest.partition(")")[0])


def _source(instructions: Mapping[str, _Instruction], name: str) -> _Instruction:
    """Return the instruction that made a value, before copies."""
    each = instructions[name]
    while each.opcode in ("copy", "bitcast"):
        each = instructions[each.operands[0]]
    return each
