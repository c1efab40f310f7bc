# SPDX-License-Identifier: Apache-2.0
"""The peak of a device, for rooflines: from its maker's documents, or measured on request."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.autotuner.compile.targets import Target, target_names
from ejkernel.ops.autotuner.measure.measurement import benchmark
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import kernel_of
from ejkernel.ops.core.types import Cost
from ejkernel.ops.utils.error_text import error_text, printable, value_text
from ejkernel.ops.utils.fingerprint import device_fingerprint
from ejkernel.ops.utils.values.signature import is_array

logger = logging.getLogger(__name__)

_TRIES: Final = 30  # times of a peak; the least counts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peak:
    """The most that a device can do with one dtype.

    Attributes:
        dtype: The dtype.
        tflops: 10¹² floating-point operations per second, without sparsity.
        gbytes: 10⁹ bytes of its memory per second.
        source: Where the figures come from.
    """

    dtype: str
    tflops: float
    gbytes: float
    source: str

    @property
    def in_words(self) -> str:
        """The figures with their source."""
        return f"{self.dtype}: {rate(self.tflops)} TFLOP/s and {rate(self.gbytes)} GB/s ({self.source})"

    def attainable(self, intensity: float) -> float:
        """Return the most TFLOP/s for a call with so many floating-point operations per byte."""
        return min(self.tflops, intensity * self.gbytes / 1e3)

    def limit(self, intensity: float) -> str:
        """Return the limit of such a call: `compute` or `memory`."""
        return "memory" if intensity * self.gbytes / 1e3 < self.tflops else "compute"

    def seconds(self, cost: Cost) -> float:
        """Return the least seconds for a call with this work, by the roofline model."""
        return max(cost.flops / (self.tflops * 1e12), cost.bytes / (self.gbytes * 1e9))


def cost_of(inv: Invocation[Any, Any]) -> Cost | None:
    """Return the work of a call; `None` if its kernel does not define it, or defines it wrongly."""
    try:
        cost = kernel_of(inv).cost(inv)
        if cost is None or (cost.flops >= 0 and cost.bytes >= 0):
            return cost
        why = f"returned {value_text(cost)}"
    except Exception as error:  # noqa: BLE001 - an error in the user's method
        why = f"raised {error_text(error)}"
    logger.warning("the work of %s is unknown: cost %s", printable(inv.op_id_v), why)
    return None


def rate(value: float) -> str:
    """Return a rate with three digits, e.g. `0.0407`, `3.35` or `3,350`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@dataclasses.dataclass(frozen=True)
class _Chip:
    """A chip: TFLOP/s by dtype, GB/s, and the document with the figures."""

    tflops: Mapping[str, float]
    gbytes: float
    source: str


def _nvidia(bf16: float, gbytes: float, source: str, *, fp8: bool = True) -> _Chip:
    """Return a GPU; JAX multiplies float32 in TF32, which runs at half the speed of bfloat16."""
    tflops = {"bfloat16": bf16, "float16": bf16, "float32": bf16 / 2, "int8": 2 * bf16}
    if fp8:
        tflops |= dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), 2 * bf16)
    return _Chip(tflops, gbytes, source)


def _tpus() -> dict[str, _Chip]:
    """Return the TPUs with a target file; JAX multiplies float32 in one pass of bfloat16."""
    chips: dict[str, _Chip] = {}
    for target in map(Target.named, target_names()):
        bf16, int8 = target.number_named("bfloat16_tflops"), target.number_named("int8_tops")
        if bf16 is not None:
            tflops = {"bfloat16": bf16, "float32": bf16} | ({} if int8 is None else {"int8": int8})
            gbytes = (target.number_named("memory_bandwidth") or 0.0) / 1e9
            chips[target.fingerprint] = _Chip(tflops, gbytes, target.property_named("source"))
    return chips


_A100, _H100 = "NVIDIA A100 data sheet", "NVIDIA H100 data sheet, without sparsity"
_CHIPS: Final[Mapping[str, _Chip]] = {
    "gpu:nvidia_a100_sxm4_40gb": _nvidia(312, 1555, _A100, fp8=False),
    "gpu:nvidia_a100_pcie_40gb": _nvidia(312, 1555, _A100, fp8=False),
    "gpu:nvidia_a100_sxm4_80gb": _nvidia(312, 2039, _A100, fp8=False),
    "gpu:nvidia_a100_80gb_pcie": _nvidia(312, 1935, _A100, fp8=False),
    "gpu:nvidia_h100_80gb_hbm3": _nvidia(989, 3350, _H100),
    "gpu:nvidia_h200": _nvidia(989, 4800, "NVIDIA H200 data sheet, without sparsity"),
    "gpu:nvidia_b200": _nvidia(2250, 8000, "NVIDIA HGX B200 data sheet, without sparsity"),
    **_tpus(),
}


def peak_of(device: str, dtype: str, *, measure: bool = False) -> Peak | None:
    """Return the peak of a device for a dtype; `None` if it is not known.

    Args:
        device: The device.
        dtype: The dtype.
        measure: Whether to measure the peak of the device of this process, rather than to look it up.
    """
    if measure and device == device_fingerprint():
        return _measured(dtype)
    chip = _CHIPS.get(device)
    if chip is None or dtype not in chip.tflops:
        return None
    return Peak(dtype=dtype, tflops=chip.tflops[dtype], gbytes=chip.gbytes, source=chip.source)


def main_dtype(inv: Invocation[Any, Any]) -> str:
    """Return the dtype of a call's largest array; empty without arrays."""
    arrays = [x for x in jax.tree.leaves((inv.abstract_args, inv.abstract_kwargs)) if is_array(x)]
    largest = max(arrays, key=lambda array: float(np.prod(array.shape)), default=None)
    return "" if largest is None else str(largest.dtype)


@functools.cache
def _measured(dtype: str) -> Peak | None:
    """Return the best of a few large matrix products and copies; `None` for a dtype without matrix products."""
    if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        return None
    is_cpu = jax.devices()[0].platform == "cpu"
    size, count = (1024, 1 << 24) if is_cpu else (8192, 1 << 28)  # short enough for a pause of other processes
    rng = np.random.default_rng(0)
    square = jnp.asarray(rng.standard_normal((size, size)), dtype)
    line = jnp.ones((count,), jnp.float32)
    product, copy = _least(jax.jit(jnp.dot), square, square), _least(jax.jit(lambda x: x + 1), line)
    return Peak(
        dtype=dtype,
        tflops=2 * size**3 / product * 1e-9,
        gbytes=2 * line.nbytes / copy * 1e-6,
        source=f"measured here: a product of {size} by {size} matrices, and a copy of {line.nbytes >> 20} MiB",
    )


def _least(function: Callable[..., Any], *args: Any) -> float:
    """Return the least time of a call in milliseconds: other processes can only add to it."""
    return min(benchmark(function, *args, num_iters=1) for _ in range(_TRIES))
