# SPDX-License-Identifier: Apache-2.0
"""`python compiled_for_hopper.py`: compile the kernels for an H200; JAX's switches print what ptxas reports."""

from __future__ import annotations

import jax

from ejkernel.kernels.paged_attention.operation import paged_attention
from ejkernel.ops import Invocation
from ejkernel.ops.autotuner.compile.targets import Target, compile_for
from ejkernel.ops.core.transformations.nodes import Choice

SEQUENCES, COLUMNS = 16, 64
ALL = {"logits_soft_cap": 30.0, "sliding_window": 1000, "return_lse": True}


def calls():
    """Return name, tokens, heads, KV heads, head_dim, page size, whether the call has all options, and the cache."""
    yield "decode", 16, 32, 8, 128, 16, False
    yield "decode, all options", 16, 32, 8, 128, 64, True
    yield "decode, head_dim 64", 16, 64, 8, 64, 64, False
    yield "decode, 64 heads per KV head", 16, 64, 1, 128, 16, False
    yield "decode, float8", 16, 32, 8, 128, 16, False, "float8_e4m3fn"
    yield "decode, int8, all options", 16, 32, 8, 128, 64, True, "int8"
    yield "few tokens", 64, 32, 8, 128, 16, False
    yield "latent", 16, 128, 1, 576, 16, False
    yield "latent, all options", 64, 16, 1, 576, 64, True
    yield "mixed", 1000, 32, 8, 128, 16, False
    yield "mixed, all options, head_dim 64", 1000, 12, 4, 64, 64, True
    yield "mixed, int8", 1000, 32, 8, 128, 16, False, "int8"
    yield "decode, head_dim 256", 16, 40, 8, 256, 16, False
    yield "decode, head_dim 256, all options", 16, 8, 1, 256, 64, True
    yield "few tokens, head_dim 256", 64, 32, 4, 256, 16, False
    yield "decode, head_dim 256, int8", 16, 40, 8, 256, 16, False, "int8"
    yield "decode, head_dim 96", 16, 32, 32, 96, 16, False
    yield "decode, head_dim 96, float8", 16, 32, 32, 96, 16, False, "float8_e4m3fn"
    yield "mixed, head_dim 256", 1000, 40, 8, 256, 16, False
    yield "mixed, all options, head_dim 256", 1000, 16, 8, 256, 64, True
    yield "mixed, head_dim 96", 1000, 32, 32, 96, 16, False
    yield "mixed, head_dim 80", 1000, 32, 32, 80, 64, False
    yield "mixed, head_dim 192", 1000, 32, 8, 192, 16, False


def main() -> None:
    target = Target.named("nvidia_h200")
    for name, tokens, heads, kv_heads, head_dim, page_size, with_all, *cache in calls():
        like = jax.ShapeDtypeStruct
        values = 512 if head_dim == 576 else None
        kinds = 2 if values is None else 1
        pages = like((SEQUENCES * COLUMNS, page_size, kv_heads, kinds, head_dim), *(cache or ["bfloat16"]))
        integers = (like(shape, "int32") for shape in ((SEQUENCES, COLUMNS), (SEQUENCES + 1,), (SEQUENCES,)))
        options = ALL | {"sinks": like((heads,), "float32"), "k_scale": 0.5, "v_scale": 0.5} if with_all else {}
        if values is not None:
            options = {name: value for name, value in options.items() if name != "v_scale"} | {"value_dim": values}
        q = like((tokens, heads, head_dim), "bfloat16")
        args, options = paged_attention.prepare(q, pages, *integers, implementation="mosaic_gpu", **options)
        inv = Invocation(kernel=paged_attention, args=args, kwargs=options, device=target.fingerprint)
        print(f"compiling {name}", flush=True)
        compile_for(inv, Choice(config=paged_attention.heuristic_cfg(inv), platform="gpu"), target, only_once=True)


if __name__ == "__main__":
    main()
