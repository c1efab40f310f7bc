# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.compiled_tpu`: random calls of all operations, compiled for TPUs; needs `jax[tpu]`, no TPU.

Each call is drawn by a seed: chip (of v5e, v5p and v6e, unless `--chips` names others), operation, implementation,
sizes, dtypes and options. If the implementation does not take the call, its reason is recorded. Otherwise Google's
compiler compiles, forward and backward, the heuristic's configuration and one of the space. A configuration that the
compiler refuses is a fault of ours: the space should not contain it, unless the implementation doubts that it fits in
vector memory. Nothing runs on a TPU. A process compiles one call after the other. If it ends or takes more than 600 s
for a call, this call counts as failed, and another process goes on.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import attention_tpu
from benchmarks.drawn_tpu import TARGETS, Draws

_IMPLEMENTATIONS = {
    "flash_attention": ("xla", "splash", "splash", "pallas_tpu", "pallas_tpu"),
    "grouped_matmul": ("xla", "megablox", "megablox"),
    "rms_norm": ("xla", "pallas"),
    "layer_norm": ("xla", "pallas"),
    "paged_attention": ("xla", "tpu_ragged", "tpu_ragged"),
    "quantized_matmul": ("xla",),
    "quantized_grouped_matmul": ("xla",),
    "quantize_both": ("xla",),
    "linear_cross_entropy": ("xla",),
}
_HEAD_DIMS = (64, 128, 40, 72, 136, 200)
_NARROW = ("int8", "float8_e4m3fn", "float8_e5m2")


def drawn(seed: int, index: int) -> dict[str, Any]:
    """Return a call."""
    dice = random.Random(f"{seed} {index}")
    operation = dice.choice(tuple(_IMPLEMENTATIONS))
    case: dict[str, Any] = {"chip": dice.choice(tuple(attention_tpu.TOPOLOGIES)), "operation": operation}
    case["implementation"] = dice.choice(_IMPLEMENTATIONS[operation])
    return case | _DRAWS[operation](dice)


def _size(dice: random.Random, least: int, most: int) -> int:
    """Return a size: odd or even, small as often as large."""
    return int(least * (most / least) ** dice.random())


def _dtype(dice: random.Random) -> str:
    return dice.choice(("bfloat16", "bfloat16", "float32", "float16"))


def _attention(dice: random.Random) -> dict[str, Any]:
    heads, batch = dice.choice((1, 2, 3, 5, 8)), 0 if dice.random() < 0.02 else dice.choice((1, 2, 3))
    case: dict[str, Any] = {"batch": batch, "heads": heads * dice.choice((1, 3, 4, 7)), "kv_heads": heads}
    queries = 1 if dice.random() < 0.05 else _size(dice, 1, 8192)
    head_dim = dice.choice((*_HEAD_DIMS, dice.randint(8, 256)))
    case |= {"queries": queries, "head_dim": head_dim, "causal": dice.random() < 0.5}
    case |= {"keys": dice.choice((queries, queries, _size(dice, 1, 8192)))}
    case |= {"window": dice.choice((None, None, _size(dice, 1, 16_384))), "soft_cap": dice.choice((None, None, 30.0))}
    case |= {
        "value_dim": dice.choice((head_dim, head_dim, *_HEAD_DIMS[:2], dice.randint(8, 256))),
        "segments": dice.random() < 0.25,
    }
    return case | {"key_lengths": dice.random() < 0.2, "dtype": _dtype(dice)}


def _grouped(dice: random.Random) -> dict[str, Any]:
    case: dict[str, Any] = {"rows": _size(dice, 1, 16_384), "groups": dice.choice((1, 3, 8, 61))}
    case |= {"inner": _size(dice, 8, 8192), "columns": _size(dice, 8, 8192)}
    case |= {"transpose_rhs": dice.random() < 0.3, "activation": dice.choice((None, None, "silu", "gelu"))}
    case |= {"gate": case["activation"] is not None and dice.random() < 0.5, "row_scale": dice.random() < 0.2}
    return case | {"dtype": _dtype(dice)}


def _norm(dice: random.Random) -> dict[str, Any]:
    case: dict[str, Any] = {"rows": _size(dice, 1, 20_000), "dim": _size(dice, 8, 40_000)}
    case |= {"quantize": dice.choice(_NARROW[:2]) if dice.random() < 0.3 else None}
    return case | {"residual": dice.random() < 0.5, "dtype": _dtype(dice)}


def _paged(dice: random.Random) -> dict[str, Any]:
    kv_heads = dice.choice((1, 2, 4, 8))
    case: dict[str, Any] = {
        "tokens": _size(dice, 1, 4096),
        "sequences": dice.choice((1, 4, 32)),
        "kv_heads": kv_heads,
    }
    case |= {"heads": kv_heads * dice.choice((1, 2, 5, 8)), "head_dim": dice.choice((64, 128, 128, 128, 256, 72))}
    case |= {"page": dice.choice((16, 32, 64, 128)), "pages_per_sequence": dice.choice((3, 16, 100))}
    case |= {"window": dice.choice((None, None, 300)), "soft_cap": dice.choice((None, None, 30.0))}
    case |= {"dtype": dice.choice(("bfloat16", "bfloat16", "float32"))}
    return case | {"cache": dice.choice((None, None, None, "int8", "float8_e4m3fn"))}


def _quantized(dice: random.Random) -> dict[str, Any]:
    case: dict[str, Any] = {"rows": _size(dice, 1, 8192), "inner": _size(dice, 16, 8192)}
    case |= {"columns": _size(dice, 16, 8192), "x": dice.choice((*_NARROW, "bfloat16"))}
    case |= {"w": case["x"] if case["x"] != "bfloat16" and dice.random() < 0.7 else dice.choice(_NARROW)}
    case |= {"block": dice.choice((None, None, 128)), "transpose_w": dice.random() < 0.3}
    return case | {"accumulation": dice.choice(("exact", "fast"))}


def _quantized_grouped(dice: random.Random) -> dict[str, Any]:
    case = _quantized(dice) | {"groups": dice.choice((1, 3, 8, 32)), "inner": dice.choice((128, 640, 1024, 2048))}
    activation = "silu" if "bfloat16" not in (case["x"], case["w"]) and dice.random() < 0.4 else None
    case |= {"activation": activation, "gate": dice.random() < 0.5}
    return case | {"quantize": dice.choice((None, *_NARROW[:2]))}


def _both(dice: random.Random) -> dict[str, Any]:
    case: dict[str, Any] = {"rows": _size(dice, 1, 8192), "columns": _size(dice, 8, 8192), "dtype": _dtype(dice)}
    return case | {"to": dice.choice(_NARROW)}


def _loss(dice: random.Random) -> dict[str, Any]:
    case: dict[str, Any] = {
        "rows": _size(dice, 1, 4096),
        "dim": _size(dice, 8, 4096),
        "dtype": _dtype(dice),
    }
    case |= {"vocabulary": dice.choice((50_257, _size(dice, 2, 200_000))), "transpose": dice.random() < 0.3}
    case |= {"smoothing": dice.choice((0.0, 0.1)), "soft_cap": dice.choice((None, 30.0)), "bias": dice.random() < 0.2}
    return case | {"z_loss": dice.choice((0.0, 1e-4)), "reduction": dice.choice(("mean", "none"))}


_DRAWS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "flash_attention": _attention,
    "grouped_matmul": _grouped,
    "rms_norm": _norm,
    "layer_norm": _norm,
    "paged_attention": _paged,
    "quantized_matmul": _quantized,
    "quantized_grouped_matmul": _quantized_grouped,
    "quantize_both": _both,
    "linear_cross_entropy": _loss,
}


# --- in the process that compiles ---


def _like(shape: Sequence[int], dtype: str = "bfloat16") -> Any:
    import jax

    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def program(case: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function that makes the call of a case, and where it may its gradient, and its arguments."""
    found: tuple[Callable[..., Any], tuple[Any, ...]] = globals()[f"_{case['operation']}"](case)
    return found


def _with_gradient(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return a function that computes the gradients for the first `count` arguments."""
    import jax
    import jax.numpy as jnp

    def total(*args: Any) -> Any:
        return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(function(*args)))

    return jax.grad(total, argnums=tuple(range(count)))


def _flash_attention(case: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    from ejkernel.modules import flash_attention

    batch, dtype = case["batch"], case["dtype"]
    q = _like((batch, case["queries"], case["heads"], case["head_dim"]), dtype)
    k = _like((batch, case["keys"], case["kv_heads"], case["head_dim"]), dtype)
    v = _like((batch, case["keys"], case["kv_heads"], case["value_dim"]), dtype)
    ids = (_like((batch, case["queries"]), "int32"), _like((batch, case["keys"]), "int32"))
    window = case["window"]

    def run(q: Any, k: Any, v: Any, ids: Any, lengths: Any) -> Any:
        return flash_attention(
            *(q, k, v),
            causal=case["causal"],
            segment_ids=ids if case["segments"] else None,
            key_lengths=lengths if case["key_lengths"] else None,
            sliding_window=None if window is None else (window, 0 if case["causal"] else window),
            logits_soft_cap=case["soft_cap"],
            implementation=case["implementation"],
        )

    return _with_gradient(run, 3), (q, k, v, ids, _like((batch,), "int32"))


def _grouped_matmul(case: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    from ejkernel.modules import grouped_matmul

    rows, groups, inner, columns, dtype = (case[name] for name in ("rows", "groups", "inner", "columns", "dtype"))
    matrices = _like((groups, columns, inner) if case["transpose_rhs"] else (groups, inner, columns), dtype)

    def run(lhs: Any, rhs: Any, gate: Any, scale: Any, sizes: Any) -> Any:
        return grouped_matmul(
            *(lhs, rhs, sizes),
            transpose_rhs=case["transpose_rhs"],
            activation=case["activation"],
            gate=gate if case["gate"] else None,
            row_scale=scale if case["row_scale"] else None,
            implementation=case["implementation"],
        )

    args = (_like((rows, inner), dtype), matrices, matrices, _like((rows,), "float32"), _like((groups,), "int32"))
    return _with_gradient(run, 4), args


def _rms_norm(case: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    from ejkernel.modules import rms_norm

    x, weight = _like((case["rows"], case["dim"]), case["dtype"]), _like((case["dim"],), case["dtype"])

    def run(x: Any, weight: Any, residual: Any) -> Any:
        more = {"residual": residual} if case["residual"] else {}
        more |= {"quantize": case["quantize"]} if case["quantize"] else {}
        more |= {} if case["quantize"] else {"implementation": case["implementation"]}
        return rms_norm(x, weight, **more)

    return run if case["quantize"] else _with_gradient(run, 3), (x, weight, x)


def _layer_norm(case: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    from ejkernel.modules import layer_norm

    x, weight = _like((case["rows"], case["dim"]), case["dtype"]), _like((case["dim"],), case["dtype"])

    def run(x: Any, weight: Any, bias: Any, residual: Any) -> Any:
        more = {"residual": residual} if case["residual"] else {}
        return layer_norm(x, weight, bias, **more, implementation=case["implementation"])

    return _with_gradient(run, 4), (x, weight, weight, x)


def _paged_attention(case: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    from ejkernel.modules import paged_attention

    sequences, per = case["sequences"], case["pages_per_sequence"]
    q = _like((case["tokens"], case["heads"], case["head_dim"]), case["dtype"])
    pages = (sequences * per, case["page"], case["kv_heads"], 2, case["head_dim"])
    scale = _like((case["kv_heads"],), "float32")

    def run(q: Any, pages: Any, table: Any, offsets: Any, lengths: Any, scale: Any) -> Any:
        more = {} if case["cache"] is None else {"k_scale": scale, "v_scale": scale}
        return paged_attention(
            *(q, pages, table, offsets, lengths),
            sliding_window=case["window"],
            logits_soft_cap=case["soft_cap"],
            implementation=case["implementation"],
            **more,
        )

    ints = (_like((sequences, per), "int32"), _like((sequences + 1,), "int32"), _like((sequences,), "int32"))
    return run, (q, _like(pages, case["cache"] or case["dtype"]), *ints, scale)


def _quantized_matmul(case: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    from ejkernel.modules import quantized_matmul

    x = _operand((case["rows"], case["inner"]), case["x"], (None, -1 if case["block"] is None else case["block"]))
    shape = (case["columns"], case["inner"]) if case["transpose_w"] else (case["inner"], case["columns"])
    block = (case["block"], case["block"])
    w = _operand(shape, case["w"], block if case["block"] else (None, -1) if case["transpose_w"] else (-1, None))

    def run(x: Any, w: Any) -> Any:
        return quantized_matmul(
            x,
            w,
            transpose_w=case["transpose_w"],
            preferred_element_type="bfloat16",
            accumulation=case["accumulation"],
            implementation=case["implementation"],
        )

    return run, (x, w)


def _quantized_grouped_matmul(case: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    from ejkernel.modules import grouped_matmul

    x = _operand((case["rows"], case["inner"]), case["x"], (None, -1 if case["block"] is None else case["block"]))
    shape = (case["columns"], case["inner"]) if case["transpose_w"] else (case["inner"], case["columns"])
    block = (case["block"], case["block"])
    own = block if case["block"] else (None, -1) if case["transpose_w"] else (-1, None)
    w = _operand((case["groups"], *shape), case["w"], own)

    activation = case["activation"]
    more: dict[str, Any] = {"quantize": case["quantize"]} if activation and case["quantize"] else {}
    more = more or {"preferred_element_type": "bfloat16"}

    def run(x: Any, w: Any, sizes: Any) -> Any:
        return grouped_matmul(
            *(x, w, sizes),
            transpose_rhs=case["transpose_w"],
            activation=activation,
            gate=w if activation and case["gate"] else None,
            accumulation=case["accumulation"],
            implementation=case["implementation"],
            **more,
        )

    return run, (x, w, _like((case["groups"],), "int32"))


def _quantize_both(case: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    from ejkernel.modules import quantize_both

    def run(x: Any) -> Any:
        return quantize_both(x, dtype=case["to"], implementation=case["implementation"])

    return run, (_like((case["rows"], case["columns"]), case["dtype"]),)


def _operand(shape: tuple[int, ...], dtype: str, block: tuple[int | None, int | None]) -> Any:
    """Return an operand; blocks are per row (`None`), of the whole axis (-1), or of so many elements."""
    from ejkernel.modules import Quantized

    if dtype == "bfloat16":
        return _like(shape)
    sizes = tuple(1 if size is None else None if size == -1 else size for size in block)
    own = [1 if size is None else -(-whole // size) for whole, size in zip(shape[-2:], sizes, strict=True)]
    return Quantized(values=_like(shape, dtype), scale=_like((*shape[:-2], *own), "float32"), block=sizes)


def _linear_cross_entropy(case: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    from ejkernel.modules import linear_cross_entropy

    rows, dim, vocabulary = case["rows"], case["dim"], case["vocabulary"]
    weight = _like((vocabulary, dim) if case["transpose"] else (dim, vocabulary))

    def run(x: Any, weight: Any, bias: Any, labels: Any) -> Any:
        return linear_cross_entropy(
            *(x, weight, labels),
            bias=bias if case["bias"] else None,
            transpose_weight=case["transpose"],
            label_smoothing=case["smoothing"],
            logits_soft_cap=case["soft_cap"],
            z_loss=case["z_loss"],
            reduction=case["reduction"],
            implementation=case["implementation"],
        )

    args = (_like((rows, dim)), weight, _like((vocabulary,), "float32"), _like((rows,), "int32"))
    return _with_gradient(run, 3), args


def compiled(case: dict[str, Any]) -> dict[str, Any]:
    """Compile two configurations of each call of a case; return the results, or why the case has no call."""
    import jax

    from ejkernel.ops.autotuner.compile.bundles import aimed_calls
    from ejkernel.ops.autotuner.compile.targets import compile_for
    from ejkernel.ops.core.transformations.nodes import Choice
    from ejkernel.ops.errors import EjkernelError
    from ejkernel.ops.execution.discovery import discover_for

    target, (function, args) = TARGETS[case["chip"]], program(case)
    try:
        with target.entered():
            calls = discover_for(jax.jit(function), args, {}, platform="tpu")
    except EjkernelError as error:
        return {"refused": " ".join(str(error).split())[:300]}
    outcomes = []
    for aimed, (first, *others) in aimed_calls(calls, target, None, 100, "compile"):
        chosen = [first, *random.Random(str(case)).sample(others, min(1, len(others)))]
        for config in chosen:
            start = time.monotonic()
            found = {"operation": aimed.op_id, "config": str(config), "space": len(others) + 1}
            try:
                compile_for(aimed, Choice(config=config, platform=aimed.platform), target)
            except Exception as error:  # noqa: BLE001 - whatever the compiler raises is the answer
                status = "doubted" if _doubts(aimed, config) and "RESOURCE_EXHAUSTED" in str(error) else "error"
                found[status] = " ".join(str(error).split())[:600]
            outcomes.append(found | {"seconds": round(time.monotonic() - start, 1)})
    return {"outcomes": outcomes}


def _doubts(inv: Any, config: Any) -> bool:
    """Return whether an implementation leaves it to the compiler whether a configuration fits in memory."""
    call = inv.kernel.call_of(inv)
    params = config.bwd if call.backward else config.fwd
    return params is not None and inv.kernel.implementations[config.implementation].doubt(call, params) is not None


# --- in the caller ---


def _counts(results: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the numbers of configurations by operation: `compiled`, `doubted`, `failed`, and of calls `refused`."""
    found: dict[str, Counter[str]] = {}
    for one in results:
        found.setdefault(one["operation"], Counter()).update(_statuses(one))
    return {name: dict(counts) for name, counts in sorted(found.items())}


def _statuses(result: dict[str, Any]) -> list[str]:
    if "outcomes" not in result:
        return ["refused" if "refused" in result else "failed"]
    return ["failed" if "error" in one else "doubted" if "doubted" in one else "compiled" for one in result["outcomes"]]


def _table(results: list[dict[str, Any]]) -> str:
    """Return the counts as a Markdown table, and the reason of each call that is refused or fails."""
    statuses = ("compiled", "doubted", "failed", "refused")
    lines = [
        "| operation | configurations compiled | left to the compiler, which refused | failed | calls refused |",
        "|---|---|---|---|---|",
    ]
    for name, counts in _counts(results).items():
        lines.append(f"| {name} | {' | '.join(str(counts.get(status, 0)) for status in statuses)} |")
    reasons = Counter(reason for one in results for reason in _reasons(one))
    return "\n".join([*lines, "", *(f"- {count} × {reason}" for reason, count in sorted(reasons.items()))])


def _reasons(result: dict[str, Any]) -> list[str]:
    if "outcomes" not in result:
        status = "refused" if "refused" in result else "failed"
        return [f"{result['implementation']} {status}: {result.get('refused') or result['error']}"]
    return [f"{one['config']} failed: {one['error']}" for one in result["outcomes"] if "error" in one]


DRAWS = Draws(
    module="compiled_tpu",
    about=__doc__,
    what="random calls of all operations, compiled by Google's compiler; nothing ran on a TPU",
    drawn=drawn,
    compiled=compiled,
    facts=lambda results: {"counts": _counts(results)},
    title="Random calls, compiled for TPUs",
    table=_table,
    chips=tuple(TARGETS),
    seconds=600.0,
)


if __name__ == "__main__":
    DRAWS.main()
