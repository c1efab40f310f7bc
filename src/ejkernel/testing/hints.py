# SPDX-License-Identifier: Apache-2.0
"""What the author of a kernel can do about failed checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

GROUPS: Final = (
    "gradient",
    "second derivative",
    "tangents",
    "vmap",
    "inputs",
    "dtypes",
    "platforms",
    "key",
    "pickle",
    "export",
    "split",
)

_HINTS: Final = {  # beginnings of the names of checks
    "types": "the results must have the same shapes and dtypes under every configuration",
    "repeated": "results must depend on the arguments only: look for memory that is read before it is written, for a "
    "race between programs, and for counters or random numbers outside of the arguments",
    "arguments": "write to a copy of the argument, or declare the alias inside the kernel only",
    "gradient of": "compare the rule, or the backward's tiles, with JAX's gradient of `reference`",
    "gradient, by": "compare the rule with JAX's gradient of a plain function, and give the kernel a `reference`",
    "second": "differentiate the gradient rule once more by hand: it may treat a residual as a constant",
    "vmap": "`run` sees one example; code that uses the size of a batch, or of the grid, is wrong for many",
    "tangents": "compare the tangent rule with `jax.jvp` of `reference`",
    "scaled": "compute sums and exponentials in float32, and subtract the largest value before an exponential",
    "zeros": "divide and take roots only where the argument is not zero",
    "odd sizes": "mask the rest of a length that the block does not divide, or leave such blocks out of the space",
    "residuals": "residuals must mean the same under every configuration, because forward and backward are tuned apart",
    "bfloat16": "sum in float32, and convert the result at the end",
    "float16": "sum in float32, and convert the result at the end",
    "weak types": "convert arguments to one dtype before you compute, e.g. by `jnp.asarray(x, x.dtype)`",
    "key": "give static arguments a name that other processes can find, see `nameable`",
    "pickle": "define the kernel at the top of a module, and keep what its constructor gets",
    "shard_map": "check the sharding rule: an axis that is summed over must not be split",
    "split": "check the sharding rule: an axis that is summed over must not be split",
}
FIXED: Final = "\N{WORD JOINER}"
"""A space inside of a word, where lines must not break."""

_GROUPS: Final = {  # beginnings of the names of checks, and the group that has them
    "gradient": "gradient",
    "under grad": "gradient",
    "residuals": "gradient",
    "second": "second derivative",
    "vmap": "vmap",
    "tangents": "tangents",
    "scaled": "inputs",
    "zeros": "inputs",
    "odd sizes": "inputs",
    "float": "dtypes",
    "bfloat16": "dtypes",
    "weak types": "dtypes",
    "lowered": "platforms",
    "key": "key",
    "pickle": "pickle",
    "export": "export",
    "split": "split",
    "shard_map": "split",
}


def next_steps(checks: Sequence[str], config: Any) -> list[str]:
    """Return what to do about failed checks: what usually causes them, and how to repeat the first of them alone.

    Args:
        checks: Names of the failed checks.
        config: The configuration of the first one; `None` if it does not depend on one.
    """
    named = ["odd sizes" if "instead of" in check else check for check in dict.fromkeys(checks)]
    steps = [f"{start}: {hint}" for start, hint in _HINTS.items() if any(name.startswith(start) for name in named)]
    group = next((group for start, group in _GROUPS.items() if named[0].startswith(start)), None)
    kept = {group, "gradient"} if group in ("inputs", "dtypes", "vmap") else {group}
    without = [other for other in GROUPS if other not in kept]
    only = "" if config is None else f"configs=[{config!r}], "
    # The lines must not break inside a name.
    call = f"check_kernel(kernel, ..., {only}without={without})".replace(
        "second derivative", f"second{FIXED}derivative"
    )
    return [*steps, f"to repeat the check {checks[0]!r} alone: {call}"]
