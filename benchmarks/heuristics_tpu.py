# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.heuristics_tpu`: compile the heuristics of attention for TPUs; needs `jax[tpu]`, no TPU.

Each call is drawn by a seed: chip (v4, v5e, v5p, v6e, tpu7x), implementation (`splash`, `pallas_tpu`), direction,
lengths up to 131,072 (16,384 for `splash`), head dimensions from 8 to 320, grouped heads, windows, soft caps, segment
ids, lengths, bfloat16 and float32. Three of four calls are compiled with the heuristic's parameters, which has to
succeed. The others show what the estimate of vector memory costs: their parameters are of the space before those that
do not fit are dropped, and either refused or left to the compiler. Nothing runs on a TPU. A program that takes more
than 240 s is not compiled.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.drawn_tpu import TARGETS, Draws
from benchmarks.memory_attention_tpu import params_of, parts_of_call
from ejkernel import compat

# JAX builds the mask of splash attention for all pairs of positions, which takes 40 s for 100,000.
_LONGEST = {"splash": 16_384, "pallas_tpu": 131_072}
_ELEMENTS = 1 << 28  # of an array: a chip has 16 GiB or more
_KINDS = ("heuristic", "heuristic", "heuristic", "doubtful")


def drawn(seed: int, index: int) -> dict[str, Any]:
    """Return a call, and the origin of its parameters: `heuristic`, `refused`, or `left` to the compiler."""
    dice = random.Random(f"heuristics {seed} {index}")
    kind, case = dice.choice(_KINDS), _drawn_call(dice)
    for _ in range(100):
        found = _with_params(case, kind, dice)
        if found is not None:
            return found
        case = _drawn_call(dice)
    return case | {"kind": "none"}


def _drawn_call(dice: random.Random) -> dict[str, Any]:
    case: dict[str, Any] = {"chip": dice.choice(tuple(TARGETS)), "implementation": dice.choice(tuple(_by_name()))}
    case |= {"direction": dice.choice(("forward", "backward")), "dtype": dice.choice(("bfloat16", "float32"))}
    longest = _LONGEST[case["implementation"]]
    queries = _length(dice, longest)
    case |= {"queries": queries, "keys": queries if dice.random() < 0.7 else _length(dice, longest)}
    head_dim = dice.choice((64, 128, 128, 256, dice.randint(8, 320)))
    case |= {"head_dim": head_dim, "value_dim": dice.choice((head_dim, head_dim, head_dim, dice.randint(8, 320)))}
    kv_heads, repeats = dice.choice((1, 2, 5)), dice.choice((1, 1, 2, 4, 7))
    batch = min(dice.choice((1, 2, 8)), max(1, _ELEMENTS // (kv_heads * repeats * max(queries, case["keys"]) * 320)))
    case |= {"batch": batch, "kv_heads": kv_heads, "repeats": repeats}
    rules = dice.choice(("causal", "causal", "full", "window", "two sides"))
    window = int(_length(dice, longest) * dice.choice((0.1, 1)))
    case |= {"left": window if rules in ("window", "two sides") else None}
    case |= {"right": {"full": None, "two sides": window // 2}.get(rules, 0)}
    case |= {"soft_cap": dice.choice((None, None, None, 30.0)), "segments": dice.random() < 0.25}
    return case | {"key_lengths": dice.random() < 0.15}


def _length(dice: random.Random, longest: int) -> int:
    """Return a length: any, or a power of two; long as often as short."""
    length = int(longest ** dice.uniform(0.3, 1))
    return length if dice.random() < 0.5 else 1 << length.bit_length() - 1


def _by_name() -> dict[str, Any]:
    from ejkernel.kernels.flash_attention.pallas_tpu.implementation import PallasTpu
    from ejkernel.kernels.flash_attention.splash import Splash

    return {"splash": Splash(), "pallas_tpu": PallasTpu()}


def _with_params(case: dict[str, Any], kind: str, dice: random.Random) -> dict[str, Any] | None:
    """Return the case with parameters of a kind, or with the reason why the call is refused; `None` without any."""
    implementation, (call, _) = _by_name()[case["implementation"]], described(case)
    reason = implementation.unsupported(call)
    if reason is not None:
        return case | {"kind": "unsupported", "reason": reason} if kind == "heuristic" else None
    if kind == "heuristic":
        return case | {"kind": kind, "params": dataclasses.asdict(implementation.heuristic(call))}
    wanted = dice.choice(("refused", "left"))
    found = [params for params in implementation.every(call) if _status(implementation, call, params) == wanted]
    return case | {"kind": wanted, "params": dataclasses.asdict(dice.choice(found))} if found else None


def _status(implementation: Any, call: Any, params: Any) -> str:
    """Return the verdict of the estimate about parameters: `refused`, `left` to the compiler, or `fits`."""
    if implementation.params_fault(call, params) is not None:
        return "refused"
    return "fits" if implementation.doubt(call, params) is None else "left"


def described(case: dict[str, Any]) -> tuple[Any, Any]:
    """Return the call of a case, and its operands."""
    import jax

    from ejkernel.kernels.flash_attention.common import Operands, Rules, describe

    batch, heads = case["batch"], case["kv_heads"] * case["repeats"]

    def like(length: int, heads: int, dim: int) -> Any:
        return jax.ShapeDtypeStruct((batch, length, heads, dim), case["dtype"])

    def ints(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, "int32")

    query = like(case["queries"], heads, case["head_dim"])
    key, value = (like(case["keys"], case["kv_heads"], case[name]) for name in ("head_dim", "value_dim"))
    ids = (ints(batch, case["queries"]), ints(batch, case["keys"])) if case["segments"] else (None, None)
    more = {"query_segments": ids[0], "key_segments": ids[1]}
    operands = Operands(query, key, value, **more, key_lengths=ints(batch) if case["key_lengths"] else None)
    rules = Rules(scale=0.1, left=case["left"], right=case["right"], soft_cap=case["soft_cap"])
    backward, target = case["direction"] == "backward", TARGETS[case["chip"]]
    return describe(operands, rules, platform="tpu", fingerprint=target.fingerprint, backward=backward), operands


def parts_of(case: dict[str, Any]) -> list[Any]:
    """Return the memory of each kernel by its causes."""
    implementation, (call, _) = _by_name()[case["implementation"]], described(case)
    return parts_of_call(implementation, call, params_of(implementation, call, case["params"]))


# --- in the process that compiles ---


def compiled(case: dict[str, Any]) -> dict[str, Any]:
    """Compile a case; return the bytes of vector memory of its kernels."""
    import jax

    if "params" not in case:
        return {}
    target, (call, operands) = TARGETS[case["chip"]], described(case)
    implementation = _by_name()[case["implementation"]]
    params, rules = params_of(implementation, call, case["params"]), call.rules

    def like(*shape: int, dtype: str = case["dtype"]) -> Any:
        return target.placed(jax.ShapeDtypeStruct(shape, dtype))

    operands = jax.tree.map(target.placed, operands)
    with target.entered():
        if call.backward:
            out, lse = like(*call.query[:3], call.value[3]), like(call.query[0], call.query[2], call.query[1])
            lse = like(*lse.shape, dtype="float32")
            run = jax.jit(lambda o, out, lse: implementation.differentiate(o, (out, lse), out, rules, params))
            lowered = run.lower(operands, out, lse)
        else:
            lowered = jax.jit(lambda o: implementation.attend(o, rules, params)).lower(operands)
        return {"used": compat.executables.vector_memory(str(lowered.compile().as_text()))}


# --- in the caller ---


def _outcome(one: dict[str, Any]) -> str:
    error = one.get("error")
    if error is None:
        return "compiled"
    if "took more than" in error:
        return "no answer in time"
    return "too much vector memory" if "vmem" in error.lower() else "failed"


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the outcomes by kind of parameters, as a Markdown table, and each heuristic that fails."""
    names = ("compiled", "too much vector memory", "failed", "no answer in time")
    lines = [f"| parameters | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    kinds = {
        "heuristic": "the heuristic's",
        "fits": "of the space, passed by the estimate",
        "left": "of the space, left to the compiler",
        "refused": "of the space, refused by the estimate",
    }
    for kind, label in kinds.items():
        counts = Counter(_outcome(one) for one in results if one["kind"] == kind)
        lines.append(f"| {label} | {' | '.join(str(counts[name]) for name in names)} |")
    reasons = Counter(one["reason"] for one in results if one["kind"] == "unsupported")
    lines += ["", f"Refused calls: {sum(reasons.values())}", ""]
    lines += [f"- {count} x {reason}" for reason, count in sorted(reasons.items())]
    failed = [one for one in results if one["kind"] == "heuristic" and "error" in one]
    lines += ["", "Heuristics that were not compiled:", ""] if failed else []
    return "\n".join([*lines, *(f"- {one['chip']}, {one['implementation']}: {one['error']}" for one in failed)])


DRAWS = Draws(
    module="heuristics_tpu",
    about=__doc__,
    what="untuned attention calls, compiled by Google's compiler; nothing ran on a TPU",
    drawn=drawn,
    compiled=compiled,
    title="Heuristics of attention, compiled for TPUs",
    table=table,
    chips=(),
    seconds=240.0,
)


if __name__ == "__main__":
    DRAWS.main()
