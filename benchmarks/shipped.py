# SPDX-License-Identifier: Apache-2.0
"""Make the configurations that the package ships: calls of published models, tuned on one GPU.

    python -m benchmarks.shipped compile models BUNDLES     # anywhere with JAX's CUDA plugin
    python -m benchmarks.shipped tune models BUNDLES CACHE  # on the GPU: seconds a call
    python -m benchmarks.shipped ship CACHE                 # the results, into src/ejkernel/data/configs

`models` is their attention, `experts` their grouped products, `quantized` their products in 8 bits, `cases` the cases
of `benchmarks.attention`. `--target` names the GPU, by default an H200. The candidates of a call are variants of its
heuristic, and configurations that were the best for some other shape; each is compiled once. All are measured, and the
decision is the same as in `ejkernel tune`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from benchmarks import attention, attention_cases, experts, quantized_uses
from ejkernel.kernels.flash_attention.mosaic_gpu import backward_support, forward_support
from ejkernel.kernels.flash_attention.mosaic_gpu.params import ForwardParams
from ejkernel.kernels.flash_attention.operation import FlashAttentionConfig
from ejkernel.modules import flash_attention
from ejkernel.ops import AutotunePolicy, ConfigSelectorChain, Invocation, PersistentCache
from ejkernel.ops.autotuner.compile.bundles import compile_bundle, read_bundle
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.autotuner.process.worker import worker_session
from ejkernel.ops.core.kernel import kernel_of
from ejkernel.ops.errors import ConfigError, TuningError
from ejkernel.ops.execution.discovery import discover_for
from ejkernel.ops.utils.storage.serialize import stable_json

TARGET = "nvidia_h200"  # by default
GROUPED = (*experts.OPERATIONS, *quantized_uses.OPERATIONS)  # whose calls have no scores to check
SHIPPED = Path(__file__).resolve().parents[1] / "src" / "ejkernel" / "data" / "configs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """How a model calls attention.

    Attributes:
        heads: Of queries, and of keys.
        dims: Head size of queries and keys, and of values.
        scale: Of the logits; `None`: as usual.
    """

    heads: tuple[int, int]
    dims: tuple[int, int] = (128, 128)
    scale: float | None = None
    cap: float | None = None
    window: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Use:
    """One use of a model: how long its sequences are, and whether documents are packed into them."""

    batch: int
    seq: int
    packed: bool = False
    training: bool = True


def _use(batch: int, seq: int) -> Use:
    return Use(batch=batch, seq=seq)


def _packed(batch: int, seq: int) -> Use:
    return Use(batch=batch, seq=seq, packed=True)


def _prefill(batch: int, seq: int) -> Use:
    return Use(batch=batch, seq=seq, training=False)


LLAMA_3_8B = Model(heads=(32, 8))  # as Qwen-3 4B and 8B
LLAMA_3_70B = Model(heads=(64, 8))  # as Qwen-3 32B
LLAMA_3_70B_OF_8 = Model(heads=(8, 1))  # on one of eight devices
QWEN_3_30B = Model(heads=(32, 4))  # A3B
GEMMA_2_9B = Model(heads=(16, 8), dims=(256, 256), cap=50.0)
GEMMA_2_27B = Model(heads=(32, 16), scale=144**-0.5, cap=50.0)
GEMMA_3_4B = Model(heads=(8, 4), dims=(256, 256))
GEMMA_3_27B = Model(heads=(32, 16), scale=168**-0.5)
DEEPSEEK_V3 = Model(heads=(128, 128), dims=(192, 128))
DEEPSEEK_V3_OF_8 = Model(heads=(16, 16), dims=(192, 128))


def _local(model: Model, window: int) -> Model:
    return dataclasses.replace(model, window=window)


# The most valuable first: the device may be gone before the list ends.
USES: list[tuple[str, Model, Use]] = [
    ("Llama-3 8B", LLAMA_3_8B, _packed(1, 8192)),
    ("Llama-3 8B", LLAMA_3_8B, _use(2, 4096)),
    ("Llama-3 8B", LLAMA_3_8B, _use(1, 8192)),
    ("Gemma-2 9B", GEMMA_2_9B, _use(2, 4096)),
    ("DeepSeek-V3, an eighth", DEEPSEEK_V3_OF_8, _use(2, 4096)),
    ("Gemma-3 4B", GEMMA_3_4B, _use(1, 8192)),
    ("Gemma-3 4B, local", _local(GEMMA_3_4B, 1024), _use(1, 8192)),
    ("Llama-3 70B", LLAMA_3_70B, _use(1, 8192)),
    ("Llama-3 70B", LLAMA_3_70B, _packed(1, 8192)),
    ("Llama-3 70B, an eighth", LLAMA_3_70B_OF_8, _use(1, 8192)),
    ("Gemma-2 9B, local", _local(GEMMA_2_9B, 4096), _use(1, 8192)),
    ("Gemma-2 27B", GEMMA_2_27B, _use(2, 4096)),
    ("Gemma-3 27B", GEMMA_3_27B, _use(1, 8192)),
    ("Gemma-3 27B, local", _local(GEMMA_3_27B, 1024), _use(1, 8192)),
    ("Qwen-3 30B-A3B", QWEN_3_30B, _use(2, 4096)),
    ("Llama-3 8B", LLAMA_3_8B, _use(4, 2048)),
    ("Llama-3 8B", LLAMA_3_8B, _use(8, 1024)),
    ("Llama-3 8B", LLAMA_3_8B, _use(1, 16384)),
    ("Llama-3 8B", LLAMA_3_8B, _packed(1, 32768)),
    ("Llama-3 8B", LLAMA_3_8B, _use(1, 32768)),
    ("DeepSeek-V3", DEEPSEEK_V3, _use(1, 4096)),
    ("DeepSeek-V3, an eighth", DEEPSEEK_V3_OF_8, _packed(1, 8192)),
    ("Gemma-2 9B", GEMMA_2_9B, _packed(1, 8192)),
    ("Gemma-3 4B", GEMMA_3_4B, _packed(1, 8192)),
    ("Llama-3 8B", LLAMA_3_8B, _prefill(1, 1024)),
    ("Llama-3 8B", LLAMA_3_8B, _prefill(1, 4096)),
    ("Llama-3 70B", LLAMA_3_70B, _prefill(1, 32768)),
    ("Gemma-3 4B", GEMMA_3_4B, _prefill(1, 32768)),
]


Works = dict[str, Callable[[], list[Invocation[Any, Any]]]]  # calls to tune, by name


def works_of(what: str) -> Works:
    """Return the calls of all models' attention, of their experts, or of the cases of the attention benchmark."""
    if what == "experts":
        return {name: functools.partial(experts.calls_of, *use) for name, use in experts.USES.items()}
    if what == "quantized":
        return dict(quantized_uses.USES)
    if what == "cases":
        return {name: functools.partial(attention.calls_of, case) for name, case in attention_cases.CASES.items()}
    return {f"{name}, {use}": functools.partial(calls_of, model, use) for name, model, use in USES}


def aimed(find: Callable[[], list[Invocation[Any, Any]]], target: Target | None = None) -> list[Invocation[Any, Any]]:
    """Return calls as they are on the target, by default `TARGET`."""
    target = target or Target.named(TARGET)
    with target.entered():
        found = find()
    return [dataclasses.replace(inv.abstract(), device=target.fingerprint) for inv in found]


def calls_of(model: Model, use: Use) -> list[Invocation[Any, Any]]:
    """Return the forward of a use, and its backward if it is for training."""
    size = use.batch, use.seq
    query = jax.ShapeDtypeStruct((*size, model.heads[0], model.dims[0]), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((*size, model.heads[1], model.dims[0]), jnp.bfloat16)
    value = jax.ShapeDtypeStruct((*size, model.heads[1], model.dims[1]), jnp.bfloat16)
    segments = (jax.ShapeDtypeStruct(size, jnp.int32),) if use.packed else ()

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, *segments: jax.Array) -> jax.Array:
        return flash_attention(
            query,
            key,
            value,
            causal=True,
            softmax_scale=model.scale,
            segment_ids=segments[0] if segments else None,
            sliding_window=None if model.window is None else (model.window - 1, None),
            logits_soft_cap=model.cap,
        )

    def gradient(*arrays: jax.Array) -> Any:
        return jax.grad(lambda *own: attend(*own, *arrays[3:]).astype(jnp.float32).sum(), (0, 1, 2))(*arrays[:3])

    program = jax.jit(gradient if use.training else attend)
    return discover_for(program, (query, key, value, *segments), {}, platform="gpu")


def candidates(inv: Invocation[Any, Any]) -> list[Any]:
    """Return candidates for a call: every implementation, with a few dozen parameters for ours."""
    if inv.op_id in experts.OPERATIONS:
        return experts.candidates(inv)
    if inv.op_id in quantized_uses.OPERATIONS:
        return quantized_uses.candidates(inv)
    call = inv.kernel.call_of(inv)  # type: ignore[union-attr]  # calls found in programs have one
    field, able = ("bwd" if call.backward else "fwd"), inv.kernel.able(inv)  # type: ignore[union-attr]
    found: list[Any] = [FlashAttentionConfig(implementation=name) for name in able if name in ("cudnn", "cudnn_packed")]
    if "mosaic_gpu" in able:
        own = _backward_params(call) if call.backward else _forward_params(call)
        found += [FlashAttentionConfig(implementation="mosaic_gpu", **{field: params}) for params in own]
    return found


def _forward_params(call: Any) -> list[ForwardParams]:
    first = forward_support.heuristic(call)
    full = {"persistent": True, "query_buffers": 2}
    changes: list[dict[str, Any]] = [
        {},
        *({"kv_block": size} for size in (80, 96, 112, 144, 160, 176)),
        {"stages": 3, "kv_block": 96},
        {"ping_pong": not first.ping_pong},
        {"warpgroups": 5 - first.warpgroups},
        {"pack_heads": not first.pack_heads},
        {"heads_first": not first.heads_first},
        {**full, "share_buffer": True, "pack_heads": True, "heads_first": True},
        {"pack_heads": True, "ping_pong": False},
        *(
            {"share_buffer": share, "heads_first": heads_first, **(full if persistent else _NOT_PERSISTENT)}
            for share, heads_first, persistent in itertools.product((False, True), repeat=3)
        ),
    ]
    return list(dict.fromkeys(_running(call, first, changes)))


_NOT_PERSISTENT: dict[str, Any] = {"persistent": False, "query_buffers": 1}


def _running(call: Any, first: ForwardParams, changes: Sequence[dict[str, Any]]) -> Iterator[ForwardParams]:
    for change in changes:
        try:
            params = dataclasses.replace(first, **change)
        except ConfigError:
            continue
        if forward_support.params_fault(call, params) is None:
            yield params


def _backward_params(call: Any) -> list[Any]:
    """Return the fused forms, and of each division the first split one."""
    found, split = [], set()
    for params in backward_support.space(call):
        if params.form == "split" and params.division in split:
            continue
        if params.form == "split":
            split.add(params.division)
        found.append(params)
    return found


def _folder(bundles: Path, number: int) -> Path:
    return bundles / f"{number:03d}"


def compile_all(works: Works, only: Sequence[str], bundles: Path, processes: int, target: Target) -> None:
    """Compile the candidates of every work, each into a separate bundle; existing bundles stay."""
    target.check(loads_compiler=True)  # first: the GPU compiler cannot be loaded after JAX has been used
    for number, (name, find) in enumerate(works.items()):
        folder = _folder(bundles, number)
        if (folder / "manifest.json").exists() or name not in only:
            continue
        started = time.monotonic()
        made = compile_bundle(aimed(find, target), target, folder, candidates=candidates, processes=processes)
        programs = sum(len(call.programs) for call in made)
        print(f"{number} {name}: {programs} programs in {time.monotonic() - started:.0f} s", flush=True)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of tuning.

    Attributes:
        seconds: No search begins after this time.
        budget: Seconds of a search.
        checked: The largest number of scores for a comparison with the reference, which needs several times the
            memory of all scores.
        target: The device.
    """

    seconds: float
    budget: float
    checked: int
    target: Target


def tune_all(works: Works, only: Sequence[str], bundles: Path, cache: Path, limits: Limits) -> None:
    """Measure the compiled calls, work after work, for about `limits.seconds`; skip calls that are in the cache."""
    end = time.monotonic() + limits.seconds
    store = PersistentCache(cache, shipped=False)
    with worker_session():
        for number, (name, find) in enumerate(works.items()):
            folder = _folder(bundles, number)
            if not (folder / "manifest.json").exists() or name not in only:
                continue
            compiled = {stable_json(call.description): call for call in read_bundle(folder)}
            for inv in aimed(find, limits.target):
                if time.monotonic() < end and inv.key not in store:
                    _tune(inv, compiled.get(stable_json(inv.description)), store, name, limits)


def _tune(inv: Invocation[Any, Any], compiled: Any, store: PersistentCache, name: str, limits: Limits) -> None:
    # Gradients of grouped products are separate calls; compiling all of the reference's would take seconds.
    check: bool | Literal["outputs"] = "outputs" if inv.op_id in GROUPED else _scores(inv) <= limits.checked
    policy = AutotunePolicy(isolate=True, budget_s=limits.budget, validate=check)
    chain: ConfigSelectorChain[Any, Any] = ConfigSelectorChain(persistent=store, policy=policy)
    more = {"candidates": candidates(inv)} if compiled is None else {"compiled": compiled}
    started = time.monotonic()
    try:
        found = chain.search(inv, kernel_of(inv), policy=policy, **more)
    except TuningError as error:
        print(f"{name} {inv.op_id}: {error}", flush=True)
        return
    took = time.monotonic() - started
    print(f"{name} {inv.op_id}: {found.config} {found.speedup}, {took:.1f} s", flush=True)
    print(found.summary(), flush=True)


def _scores(inv: Invocation[Any, Any]) -> int:
    """Return how many scores a call of attention has; of another, none."""
    if inv.op_id in GROUPED:
        return 0
    call = inv.kernel.call_of(inv)  # type: ignore[union-attr]  # as above
    scores: int = call.query[0] * call.query[2] * call.query[1] * call.key[1]
    return scores


def ship(cache: Path) -> None:
    """Put the entries of a cache in place of those that the package has of the same operations."""
    found = list(PersistentCache(cache, shipped=False).entries())
    for folder in {entry.path.parent.relative_to(cache) for _, entry in found if entry.path is not None}:
        shutil.rmtree(SHIPPED / folder, ignore_errors=True)
    count = 0
    for _, entry in found:
        assert entry.path is not None  # it is a folder's
        place = SHIPPED / entry.path.relative_to(cache)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(entry.path, place)
        count += 1
    print(f"{count} entries in {SHIPPED}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one step."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shipped", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    steps = parser.add_subparsers(dest="step", required=True)
    for name, folders in (("compile", ("bundles",)), ("tune", ("bundles", "cache")), ("ship", ("cache",))):
        step = steps.add_parser(name)
        if name != "ship":
            step.add_argument("what", choices=("models", "experts", "quantized", "cases"))
            step.add_argument("--only", nargs="+", metavar="NAME", help="names of uses or cases (default: all)")
            step.add_argument("--target", default=TARGET, help="the GPU (default: %(default)s)")
        for folder in folders:
            step.add_argument(folder, type=Path)
        if name == "compile":
            step.add_argument("--processes", type=int, default=2, help="that compile (default: %(default)s)")
        if name == "tune":
            step.add_argument("--seconds", type=float, default=3600.0, help="after which no search is begun")
            step.add_argument("--checked", type=int, default=2**29, help="largest number of scores of a checked call")
            step.add_argument("--budget", type=float, default=30.0, help="seconds of a search (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.step == "ship":
        ship(args.cache)
        return 0
    works = works_of(args.what)
    only = args.only or list(works)
    unknown = sorted(set(only) - set(works))
    if unknown:
        parser.error(f"--only: no {', '.join(unknown)}; there are {', '.join(works)}")
    target = Target.named(args.target)
    if args.step == "compile":
        compile_all(works, only, args.bundles, args.processes, target)
    else:
        tune_all(works, only, args.bundles, args.cache, Limits(args.seconds, args.budget, args.checked, target))
    return 0


if __name__ == "__main__":
    sys.exit(main())
