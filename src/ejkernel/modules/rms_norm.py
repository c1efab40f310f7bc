# SPDX-License-Identifier: Apache-2.0
"""`rms_norm`: scale rows by their root mean square."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ejkernel.kernels.rms_norm import IMPLEMENTATIONS, xla
from ejkernel.kernels.rms_norm.reference import normalize
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.core.types import Cost
from ejkernel.ops.errors import ArgumentError, ConfigError
from ejkernel.ops.utils.signature import is_array, is_known

_Invocation = Invocation["RmsNormConfig", jax.Array]

# On a CPU, measured: elements of one block, and how many elements a call must have for blocks to pay. They pay most
# where XLA would keep a wide copy of narrow rows, and never in a float32 forward.
_BLOCK = 1 << 19
_WORTHWHILE = {"fwd": 1 << 24, "bwd": 1 << 22}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RmsNormConfig:
    """How one call of `rms_norm` runs, forward or backward.

    Attributes:
        implementation: Which implementation runs: `xla`.
        fwd_block_rows: Rows per block of the forward; `None`: one pass over all rows.
        bwd_block_rows: Rows per block of the backward.
    """

    implementation: str = "xla"
    fwd_block_rows: int | None = None
    bwd_block_rows: int | None = None

    def __post_init__(self) -> None:
        if self.implementation not in IMPLEMENTATIONS:
            raise ConfigError(
                f"implementation must be one of {', '.join(IMPLEMENTATIONS)}; got {self.implementation!r}."
            )
        for name in ("fwd_block_rows", "bwd_block_rows"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} must be a positive integer or None, got {value!r}.")


class RmsNorm(Kernel[RmsNormConfig, jax.Array]):
    """The operation behind `rms_norm`, which documents the arguments."""

    def __init__(self) -> None:
        super().__init__(name="rms_norm")

    def prepare(
        self, x: Any, weight: Any, *, eps: Any = 1e-6, implementation: str | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arguments."""
        for name, array, axes in (("x", x, "[..., dim]"), ("weight", weight, "[dim]")):
            if not is_array(array) or not jnp.issubdtype(array.dtype, jnp.floating):
                got = f"dtype {array.dtype}" if is_array(array) else type(array).__name__
                raise ArgumentError(f"{name} must be a floating-point array {axes}, got {got}.")
        if not x.shape or tuple(weight.shape) != tuple(x.shape[-1:]) or not x.shape[-1]:
            raise ArgumentError(
                f"weight must have the length of x's last axis; got shapes {tuple(weight.shape)} and {tuple(x.shape)}."
            )
        if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < math.inf:
            raise ArgumentError(f"eps must be a number >= 0, got {eps!r}; it is static under jit.")
        if implementation is not None and implementation not in IMPLEMENTATIONS:
            raise ArgumentError(
                f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, or None; got {implementation!r}."
            )
        return (x, weight), {"eps": float(eps), "implementation": implementation}

    def run(self, *args: Any, cfg: RmsNormConfig, **options: Any) -> Any:
        """Return the output."""
        return self.fwd_with_residuals(*args, cfg=cfg, **options)[0]

    def fwd_with_residuals(self, *args: Any, cfg: RmsNormConfig, **options: Any) -> tuple[Any, Any]:
        """Return the output, and `1 / rms` of every row."""
        x, weight = args
        return xla.forward(x, weight, options["eps"], cfg.fwd_block_rows)

    def vjp(
        self,
        residuals: Any,
        out: Any,
        cotangents: tuple[Any, ...],
        *args: Any,
        cfg: RmsNormConfig,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Return the gradients of `x` and `weight`."""
        del out, options
        x, weight = args
        return xla.backward(x, weight, residuals, cotangents[0], cfg.bwd_block_rows)

    def reference(self, *args: Any, **options: Any) -> Any:
        """Return the output, as the formula says."""
        x, weight = args
        return normalize(x, weight, options["eps"]).astype(x.dtype)

    def heuristic_cfg(self, inv: _Invocation) -> RmsNormConfig:
        """Return one pass over all rows; on a CPU blocks, where they were seen to pay."""
        rows, dim = _rows_and_dim(inv)
        direction = "bwd" if inv.direction == "bwd" else "fwd"
        narrow = inv.args[0].dtype.itemsize < 4
        if not is_known(rows, dim) or inv.platform != "cpu" or rows * dim < _WORTHWHILE[direction]:
            return RmsNormConfig()
        if direction == "fwd" and not narrow:
            return RmsNormConfig()
        return _config(inv, _even(rows, max(1, _BLOCK // dim)))

    def config_space(self, inv: _Invocation) -> Sequence[RmsNormConfig]:
        """Return one pass, and blocks of several sizes."""
        rows, dim = _rows_and_dim(inv)
        if not is_known(rows, dim):
            return [RmsNormConfig()]
        sizes = dict.fromkeys(_even(rows, max(1, elements // dim)) for elements in (1 << 15, 1 << 17, _BLOCK, 1 << 21))
        return [RmsNormConfig(), *(_config(inv, size) for size in sizes if size < rows)]

    def cost(self, inv: _Invocation) -> Cost | None:
        """Return the forward's work: four operations an element; `x` and the weight are read, the output is written."""
        if inv.direction != "fwd":
            return None
        rows, dim = _rows_and_dim(inv)
        return Cost(flops=4 * rows * dim, bytes=inv.input_bytes + rows * dim * inv.args[0].dtype.itemsize)


_rms_norm = RmsNorm()


def rms_norm(
    x: Float[Array, "*rows dim"],
    weight: Float[Array, " dim"],
    *,
    eps: float = 1e-6,
    implementation: str | None = None,
    cfg: RmsNormConfig | None = None,
) -> Float[Array, "*rows dim"]:
    """Scale `x` by the root mean square of its last axis: `x / sqrt(mean(x²) + eps) * weight`.

    Args:
        x: What is normalised.
        weight: Factor on every element of a row; of any floating-point dtype.
        eps: Added to the mean of squares.
        implementation: Run this one (`xla`) or raise; `None` leaves the choice to the configuration.
        cfg: The configuration to run with, for this call and its gradient; `None` resolves one.

    Returns:
        The output, in `x.dtype`; it is computed in float32.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype or value.
    """
    return _rms_norm(x, weight, eps=eps, implementation=implementation, cfg=cfg)


def _rows_and_dim(inv: _Invocation) -> tuple[int, int]:
    *rows, dim = inv.args[0].shape
    return math.prod(rows) * math.prod(inv.batch_sizes), dim


def _even(rows: int, most: int) -> int:
    """Return the block size, at most `most`, that cuts `rows` with the least padding."""
    return -(-rows // -(-rows // most)) if rows else 1


def _config(inv: _Invocation, size: int) -> RmsNormConfig:
    return RmsNormConfig(bwd_block_rows=size) if inv.direction == "bwd" else RmsNormConfig(fwd_block_rows=size)
