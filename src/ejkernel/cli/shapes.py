# SPDX-License-Identifier: Apache-2.0
"""The file of `ejkernel tune --shapes`: calls that share a configuration. Each line is a call in JSON, e.g.

    {"kernel": "flash_attention", "args": ["bf16[8,1024,32,128]", "bf16[8,1024,8,128]", "bf16[8,1024,8,128]"],
     "kwargs": {"causal": true}, "weight": 3}

(on a single line). A string such as `bf16[8,128]` represents an array; all other values are plain JSON. All calls of a
kernel with the same `set` share a configuration. `kwargs`, `weight` and `set` are optional.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp

from ejkernel.cli.files import Found
from ejkernel.ops.autotuner.tasks.asked import checked_weight, merged_calls
from ejkernel.ops.autotuner.tasks.task import SharedCall
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel, living_kernels, overrides, prepared
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import ArgumentError, EjkernelError, SerializationError
from ejkernel.ops.utils.formatting import counted
from ejkernel.ops.utils.messages.names import did_you_mean
from ejkernel.ops.utils.storage.serialize import parse_json

_LARGEST: Final = 1 << 24  # bytes of a file
_ARRAY: Final = re.compile(r"([a-z][a-z0-9_]*)\[(.*)")  # also matches malformed arrays, for an error
_ROUND: Final = re.compile(r"(bfloat|float|uint|int|bf|f|u|i)[0-9]+\w*\(.*")
_SIZES: Final = re.compile(r" *([0-9]+ *(, *[0-9]+ *)*)?\]")
_SHORT: Final = re.compile(r"(bf|f|u|i)(?=\d)")
_LONG: Final = {"bf": "bfloat", "f": "float", "u": "uint", "i": "int"}
_FIELDS: Final = {"kernel", "args", "kwargs", "weight", "set"}


def calls_of_shapes(path: Path) -> Found:
    """Return the calls of a file, in sets that share a configuration.

    Raises:
        ArgumentError: The file cannot be read, or a line is not a call; the message has the line number.
    """
    sets: dict[tuple[str, str], list[SharedCall]] = {}
    calls: dict[ConfigKey, Invocation[Any, Any]] = {}
    for number, text in _lines(path):
        try:
            call, named = _call(text)
            calls.setdefault(call.inv.key, call.inv)  # `key` raises if arguments do not fit the kernel
        except (EjkernelError, ValueError, TypeError) as error:
            raise ArgumentError(f"{path}, line {number}: {error}") from error
        sets.setdefault((call.inv.op_id_v, named), []).append(call)
    if not sets:
        raise ArgumentError(f"{path} has no calls; write one call per line, e.g. {_EXAMPLE}.")
    merged = tuple(tuple(merged_calls(each)) for each in sets.values())
    counts = f"{path}: {counted(len(calls), 'call')} in {counted(len(merged), 'set')}, each with one configuration"
    return Found(name=str(path), calls=tuple(calls.values()), counts=counts, sets=merged)


def call_of_types(kernel: str, types: Sequence[str], kwargs: str | None) -> Invocation[Any, Any]:
    """Return a call with abstract arrays.

    Args:
        kernel: The name of an operation or of a user's kernel.
        types: The arrays, e.g. `bf16[8,128]`.
        kwargs: Keyword arguments in JSON, e.g. `{"causal": true}`; `None`: none.

    Raises:
        ArgumentError: The kernel is unknown, a type or the JSON is malformed, or the kernel rejects the arguments.
    """
    for text in types:
        if _ARRAY.fullmatch(text) is None:
            raise ArgumentError(f"--shape must be an array with its dtype, e.g. bf16[4,8] or f32[], got {text!r}.")
    try:
        options = {} if kwargs is None else parse_json(kwargs)
    except SerializationError as error:
        raise ArgumentError(f"--kwargs must be JSON such as '{{\"causal\": true}}', got {kwargs!r}.") from error
    try:
        inv: Invocation[Any, Any] = _call(json.dumps({"kernel": kernel, "args": types, "kwargs": options}))[0].inv
        _ = inv.key  # raises if the arguments do not fit the kernel
    except (EjkernelError, ValueError, TypeError) as error:
        options_given = "" if kwargs is None else f" with {kwargs}"
        raise ArgumentError(f"{kernel}({', '.join(types)}){options_given}: {error}") from error
    return inv


_EXAMPLE: Final = '{"kernel": "rms_norm", "args": ["bf16[4096,5120]", "bf16[5120]"], "weight": 2}'


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open("rb") as stream:  # may be a pipe of unknown length
            raw = stream.read(_LARGEST + 1)
        if len(raw) > _LARGEST:
            raise ArgumentError(f"{path} is larger than the limit of {_LARGEST} bytes.")
        text = raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line


def _call(text: str) -> tuple[SharedCall, str]:
    """Return the call of a line, and the name of its set."""
    data: Any = parse_json(text)
    if not isinstance(data, dict):
        raise ArgumentError(f"a call must be a JSON object, e.g. {_EXAMPLE}; got {text.strip()[:80]}")
    unknown, missing = sorted(data.keys() - _FIELDS), sorted({"kernel", "args"} - data.keys())
    if unknown or missing:
        what = f"unknown field {unknown[0]!r}" if unknown else f"{missing[0]!r} is missing"
        raise ArgumentError(f"{what}; a call has kernel and args, and optionally kwargs, weight and set.")
    args, kwargs, named = data["args"], data.get("kwargs", {}), data.get("set", "")
    for name, value, kind in (("args", args, list), ("kwargs", kwargs, dict), ("set", named, str)):
        if not isinstance(value, kind):
            raise ArgumentError(f"{name} must be {_KINDS[kind]}, got {value!r}.")
    weight = checked_weight(data.get("weight", 1), "weight")
    kernel = _kernel(data["kernel"])
    if "cfg" in kwargs:
        raise ArgumentError("kwargs contain cfg, so nothing is left to tune; leave it out.")
    given, options = prepared(kernel, tuple(map(_value, args)), {name: _value(v) for name, v in kwargs.items()})
    inv: Invocation[Any, Any] = Invocation(kernel=kernel, args=given, kwargs=options)
    return SharedCall(inv=inv, weight=weight), named


_KINDS: Final = {list: "a list", dict: "an object", str: "a string"}


def _kernel(name: object) -> Kernel[Any, Any]:
    """Return the kernel of a name, with or without version; prefer a kernel without buckets.

    Raises:
        ArgumentError: No kernel has this name.
    """
    living = living_kernels()
    found = [kernel for op, kernels in living.items() if name in (op, op.rpartition("@")[0]) for kernel in kernels]
    if not found:
        raise ArgumentError(
            f"there is no kernel {name!r}{did_you_mean(name, [op.rpartition('@')[0] for op in living])} Kernels: "
            f"{', '.join(sorted(living))}; --import MODULE adds those of a module."
        )
    # A bucket would measure other sizes than those in the file.
    return next((kernel for kernel in found if not overrides(kernel, "bucket")), found[0])


def _value(data: Any) -> Any:
    """Return the Python value of a JSON value; strings such as `bf16[8,128]` become array types."""
    if isinstance(data, list):
        return [_value(item) for item in data]
    if isinstance(data, dict):
        return {name: _value(item) for name, item in data.items()}
    found = _ARRAY.fullmatch(data) if isinstance(data, str) else None
    if isinstance(data, str) and _ROUND.fullmatch(data):
        raise ArgumentError(f"{data!r} must have its sizes in square brackets; write e.g. bf16[8,128] or f32[].")
    if found is None:
        return data
    name = _SHORT.sub(lambda short: _LONG[short[1]], found[1], count=1)
    try:
        dtype = jnp.dtype(name)
    except TypeError as error:
        raise ArgumentError(f"{data!r} has an unknown dtype; write e.g. bf16[8,128] or int32[8].") from error
    sizes = _SIZES.fullmatch(found[2])
    if sizes is None:
        fault = "must have numbers as sizes in brackets" if "]" in data else "has no closing bracket"
        raise ArgumentError(f"{data!r} {fault}; write e.g. bf16[8,128] or f32[].")
    return jax.ShapeDtypeStruct(tuple(int(size) for size in (sizes[1] or "").split(",") if size.strip()), dtype)
