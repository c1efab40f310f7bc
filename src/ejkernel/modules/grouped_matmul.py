# SPDX-License-Identifier: Apache-2.0
"""`grouped_matmul`: rows in groups, each group multiplied with a matrix of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ejkernel.kernels.grouped_matmul.activation import GroupedMatmulActivation as GroupedMatmulActivation
from ejkernel.kernels.grouped_matmul.activation import GroupedMatmulActivationConfig as GroupedMatmulActivationConfig
from ejkernel.kernels.grouped_matmul.activation import grouped_matmul_activation as _grouped_matmul_activation
from ejkernel.kernels.grouped_matmul.operation import GroupedMatmul as GroupedMatmul
from ejkernel.kernels.grouped_matmul.operation import GroupedMatmulConfig as GroupedMatmulConfig
from ejkernel.kernels.grouped_matmul.operation import GroupedMatmulWgrad as GroupedMatmulWgrad
from ejkernel.kernels.grouped_matmul.operation import GroupedMatmulWgradConfig as GroupedMatmulWgradConfig
from ejkernel.kernels.grouped_matmul.operation import grouped_matmul as _grouped_matmul
from ejkernel.kernels.grouped_matmul.operation import grouped_matmul_wgrad as _grouped_matmul_wgrad
from ejkernel.ops.utils.messages.names import names_checked

_NAMES_ELSEWHERE = {  # in jax.lax.ragged_dot, Megablox, Tokamax, grouped_gemm and PyTorch
    "group_offset": "first_group",
    "batch_sizes": "group_sizes",
    "m_sizes": "group_sizes",
    "group_lengths": "group_sizes",
    "offs": "group_sizes= are the sizes of groups, not their ends; pass jnp.diff(offs, prepend=0).",
    "group_offsets": "group_sizes= are the sizes of groups, not offsets; pass their differences.",
    "trans_b": "transpose_rhs",
    "transpose_b": "transpose_rhs",
    "rhs_transposed": "transpose_rhs",
    "dtype": "preferred_element_type",
    "out_dtype": "preferred_element_type",
    "output_dtype": "preferred_element_type",
    "scale": "row_scale",
    "num_groups": "groups",
    "num_actual_groups": "groups",
    "tiling": "cfg",
    "config": "cfg",
    "x": "lhs",
    "a": "lhs",
    "w": "rhs",
    "b": "rhs",
    "weight": "rhs",
}


@names_checked(_NAMES_ELSEWHERE)
def grouped_matmul(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "groups k n"] | Float[Array, "groups n k"],
    group_sizes: Int[Array, " all_groups"],
    *,
    activation: Literal["silu", "gelu", "relu", "relu2"] | None = None,
    gate: Float[Array, "groups k n"] | Float[Array, "groups n k"] | None = None,
    row_scale: Float[Array, " m"] | None = None,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike | None = None,
    precision: str | jax.lax.Precision | None = None,
    first_group: int | Int[Array, ""] | None = None,
    implementation: str | Sequence[str] | None = None,
    cfg: GroupedMatmulConfig | GroupedMatmulActivationConfig | None = None,
) -> Float[Array, "m n"]:
    """Multiply the first `group_sizes[0]` rows of `lhs` with `rhs[0]`, the next `group_sizes[1]` with `rhs[1]`, ...

    What a mixture of experts computes of tokens that are sorted by expert. Groups may be of any sizes, also empty;
    nothing of one group, be it NaN or infinite, reaches the rows of another.

    Its gradient is made of two calls that are configured for themselves: a product with `rhs` transposed, and
    `grouped_matmul_wgrad`; the result's gradient is rounded to the operands' dtype before. For float16 operands, a
    power of two keeps each row of a float32 gradient, or of one that is still to be scaled, within float16's range.

    With an activation or a gate it is `activation(lhs @ rhs) * (lhs @ gate)`, of each group's matrices, in one kernel
    where there is one, and a call with a key of its own, `grouped_matmul_activation`; what is made of the sums is made
    of them in float32, before the result is rounded. Differentiated, it keeps the products, rounded to the result's
    dtype as plain JAX would, but in float32 for a float16 result. Under `jax.checkpoint` they are computed again
    instead, unless a policy saves `grouped_matmul_activation.out` and `grouped_matmul_activation.residuals`. Factors of
    rows alone keep nothing.

    Under `jax.vmap` one example is computed after the other where an implementation has no other way; batches of rows
    are better joined into one call.

    Under `jit` over a mesh it splits itself: by rows, by groups (experts), by columns, by what is summed over, and by
    several of them. Inside `jax.shard_map`, where matrices of some groups are on each device, say which these are:

        out = grouped_matmul(lhs, rhs, group_sizes, first_group=jax.lax.axis_index("expert") * rhs.shape[0])
        out = jax.lax.psum(out, "expert")

    Args:
        lhs: Rows, group after group.
        rhs: A matrix for each group, of the same dtype.
        group_sizes: How many rows each group has. They need not add up to `m`: what comes after the last group
            belongs to none, and rows that there are not do not count.
        activation: A function of the product: `silu`, `gelu` (the approximation by tanh, `jax.nn.gelu`'s default),
            `relu`, or `relu2`, its square; `None`: none.
        gate: A second matrix for each group, as `rhs` is: the result is multiplied with the product of it.
        row_scale: A factor for each row of the result, such as a router's weight; past the last group it may be
            anything.
        first_group: Where `rhs` has some of the groups alone, the number of its first in `group_sizes`, which has all:
            rows of the others are zero in the result. With a number of each device the program is one for all.
        transpose_rhs: Whether the matrices, the gate's too, are transposed, `[groups, n, k]`.
        preferred_element_type: Dtype of the result; that of `lhs` by default.
        precision: Of the products, as for `jax.lax.dot`; asked for, it leaves `xla` alone.
        implementation: Run this one (`mosaic_gpu`, `jax_mgpu`, `xla`, `megablox`), or one of these, the one to prefer
            first, or raise; `None` leaves the choice to the configuration. It is for the gradient's products, too.
        cfg: The configuration to run with, for this call alone, with an activation or a gate a
            `GroupedMatmulActivationConfig`; `None` resolves one.

    Returns:
        The result, zeros in rows past the last group; sums run in float32 (float64 for float64).

    Raises:
        ArgumentError: an argument has the wrong shape, dtype or value.
        ConfigError: `cfg` names another implementation than `implementation`, or does not fit the call.
        UnsupportedError: `implementation` cannot run this call; the message says why.
    """
    options: dict[str, Any] = {
        "transpose_rhs": transpose_rhs,
        "preferred_element_type": preferred_element_type,
        "precision": precision,
        "first_group": first_group,
        "implementation": implementation,
        "cfg": cfg,
    }
    if activation is None and gate is None:
        return _grouped_matmul(lhs, rhs, group_sizes, row_scale, **options)
    return _grouped_matmul_activation(lhs, rhs, group_sizes, gate, row_scale, activation=activation, **options)


@names_checked(_NAMES_ELSEWHERE)
def grouped_matmul_wgrad(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "m n"],
    group_sizes: Int[Array, " all_groups"],
    *,
    preferred_element_type: DTypeLike | None = None,
    precision: str | jax.lax.Precision | None = None,
    first_group: int | Int[Array, ""] | None = None,
    groups: int | None = None,
    implementation: str | Sequence[str] | None = None,
    cfg: GroupedMatmulWgradConfig | None = None,
) -> Float[Array, "groups k n"]:
    """Return `lhs[rows].T @ rhs[rows]` for the rows of each group: the gradient of `grouped_matmul`'s matrices.

    Args:
        lhs: Rows, group after group: the operand of the product.
        rhs: Rows of the same groups, of the same dtype: the gradient of its result.
        group_sizes: As for `grouped_matmul`.
        first_group: Likewise; then `groups` says how many there are.
        groups: How many groups, from the first on, the result is of; all by default.
        preferred_element_type: Dtype of the result; that of `lhs` by default.
        precision: As for `grouped_matmul`.
        implementation: Likewise, of `mosaic_gpu`, `xla` and `megablox`.
        cfg: The configuration to run with, for this call alone; `None` resolves one.

    Returns:
        The sums, zeros for empty groups; rows past the last group are in none, whatever they hold.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype or value.
        ConfigError: `cfg` names another implementation than `implementation`, or does not fit the call.
        UnsupportedError: `implementation` cannot run this call; the message says why.
    """
    return _grouped_matmul_wgrad(
        lhs,
        rhs,
        group_sizes,
        preferred_element_type=preferred_element_type,
        precision=precision,
        first_group=first_group,
        groups=groups,
        implementation=implementation,
        cfg=cfg,
    )
