# SPDX-License-Identifier: Apache-2.0
"""The calls of `benchmarks.attention`: fixed ones, and ones drawn at random from kinds of calls that models make."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._hopper import MULTIPROCESSORS
from ejkernel.ops.utils.random_arrays import random_array

UNEVEN = (500, 1300, 300, 1900, 900, 300, 2200, 792)
SIXTEEN = (1500, 300, 2100, 700, 1200, 900, 400, 1800, 1000, 1300, 200, 1600, 800, 1100, 600, 884)

_POOL = 1 << 26


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call of attention.

    Attributes:
        heads: Query heads, and key heads.
        dims: Head size of query and key, and of values.
        segments: Lengths of documents packed into each row.
        bias: Whether a full bias is added.
        mask: Whether a random boolean mask hides keys.
        lengths: Whether only some keys of each example count.
        dtype: Of query, key, value and bias.
        sinks: Whether each head has a sink; the alternatives run without.
        shared: Whether all examples share the bias, and each has a mask of its keys, as in triangle attention.
        other: The number of keys of cross attention; `None` for as many as queries.
    """

    batch: int
    seq: int
    heads: tuple[int, int]
    dims: tuple[int, int]
    causal: bool = True
    window: int | None = None
    cap: float | None = None
    segments: tuple[int, ...] = ()
    bias: bool = False
    mask: bool = False
    lengths: bool = False
    dtype: str = "bfloat16"
    sinks: bool = False
    shared: bool = False
    other: int | None = None

    @property
    def keys(self) -> int:
        """The number of keys."""
        return self.seq if self.other is None else self.other

    @property
    def kind(self) -> str:
        """The kind of call in the report, e.g. `soft cap`."""
        if self.segments:
            return "packed, 8 or more" if len(self.segments) >= 8 else "packed, fewer"
        special = {"soft cap": self.cap, "window": self.window, "bias, mask, lengths": self._extras}
        named = next((name for name, given in special.items() if given), None)
        if self.dtype == "float32":
            return "float32"
        if self.keys != self.seq:
            return "cross attention"
        if self.dims[0] != self.dims[1]:
            return "unequal head dims"
        if named is None and (self.seq % 64 or self.dims[0] not in (64, 128, 256)):
            return "odd lengths and head dims"
        return named or f"causal and full, D{self.dims[0]}"

    @property
    def _extras(self) -> bool:
        return self.bias or self.mask or self.lengths or self.shared

    def types(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the types of the inputs."""
        size, scores = (self.batch, self.seq), (self.batch, self.heads[0], self.seq, self.keys)
        shapes = {
            "query": (*size, self.heads[0], self.dims[0]),
            "key": (self.batch, self.keys, self.heads[1], self.dims[0]),
            "value": (self.batch, self.keys, self.heads[1], self.dims[1]),
        }
        types = {name: jax.ShapeDtypeStruct(shape, self.dtype) for name, shape in shapes.items()}
        if self.shared:
            types["bias"] = jax.ShapeDtypeStruct((1, *scores[1:]), self.dtype)
            types["attention_mask"] = jax.ShapeDtypeStruct((self.batch, 1, 1, self.keys), jnp.bool_)
        if self.sinks:
            types["sinks"] = jax.ShapeDtypeStruct(self.heads[:1], jnp.float32)
        if self.bias:
            types["bias"] = jax.ShapeDtypeStruct(scores, self.dtype)
        if self.mask:
            types["attention_mask"] = jax.ShapeDtypeStruct((self.batch, 1, *scores[2:]), jnp.bool_)
        if self.lengths:
            types["key_lengths"] = jax.ShapeDtypeStruct(size[:1], jnp.int32)
        if self.segments:
            types["segment_ids"] = jax.ShapeDtypeStruct(size, jnp.int32)
        return types

    def arguments(self, *, backward: bool) -> tuple[Any, ...]:
        """Return the types of a program's arguments: a cotangent, if it has a backward, and the inputs."""
        out = jax.ShapeDtypeStruct((self.batch, self.seq, self.heads[0], self.dims[1]), self.dtype)
        return (out, self.types()) if backward else (self.types(),)

    def inputs(self, seed: int, *, backward: bool) -> tuple[Any, ...]:
        """Return arrays of these types."""
        rng = np.random.default_rng(seed)

        def made(path: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
            name = getattr(path[-1], "key", "")
            if name == "segment_ids":
                ids = np.repeat(np.arange(len(self.segments), dtype=np.int32), self.segments)
                return jnp.asarray(np.broadcast_to(ids, like.shape))
            if name == "key_lengths":
                return jnp.asarray(rng.integers(self.keys // 4, self.keys + 1, like.shape), jnp.int32)
            array = _random(like, rng)
            if name == "attention_mask":
                return array | jnp.eye(like.shape[2], self.keys, dtype=bool)
            return array

        arrays: tuple[Any, ...] = jax.tree_util.tree_map_with_path(made, self.arguments(backward=backward))
        return arrays


def _random(like: jax.ShapeDtypeStruct, rng: np.random.Generator) -> jax.Array:
    """Return a random array; large ones are cut from common numbers, since a generator is compiled for each shape."""
    size = math.prod(like.shape)
    if not jnp.issubdtype(like.dtype, jnp.inexact) or size < _POOL // 64:
        return random_array(like, rng)
    start = int(rng.integers(_POOL // 2))
    return jnp.asarray(np.resize(_pool(np.dtype(like.dtype))[start:], like.shape))


@functools.cache
def _pool(dtype: np.dtype[Any]) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(_POOL, np.float32).astype(dtype)


def _case(seq: int, heads: tuple[int, int], dim: int, batch: int, **more: Any) -> Case:
    return Case(batch=batch, seq=seq, heads=heads, dims=(dim, dim), **more)


CASES = {
    "causal D128 B4 4k": _case(4096, (32, 8), 128, 4),
    "8 segments": _case(8192, (32, 8), 128, 1, segments=UNEVEN),
    "soft cap D256": _case(4096, (16, 8), 256, 2, cap=50.0),
    "D192/128": Case(batch=2, seq=4096, heads=(16, 16), dims=(192, 128)),
    "window 1k in 16k": _case(16384, (16, 8), 128, 1, window=1024),
    "bias": _case(384, (4, 4), 32, 384, causal=False, bias=True),
    "full D64 512": _case(512, (16, 16), 64, 16, causal=False),
    "causal D256 4k": _case(4096, (16, 8), 256, 2),
    "causal D64 4k": _case(4096, (32, 32), 64, 4),
    "full D128 4k": _case(4096, (16, 16), 128, 4, causal=False),
    "mask": _case(2048, (16, 16), 128, 4, causal=False, mask=True),
    "lengths": _case(2048, (16, 16), 128, 8, causal=False, lengths=True),
    "8 equal segments": _case(8192, (32, 8), 128, 1, segments=(1024,) * 8),
    "3 segments": _case(8192, (32, 8), 128, 1, segments=(2000, 5000, 1192)),
    "16 segments": _case(16384, (16, 4), 128, 1, segments=SIXTEEN),
    "causal D128 16k": _case(16384, (32, 8), 128, 1),
    "causal D128 1k": _case(1024, (16, 16), 128, 8),
    "causal D128 8k": _case(8192, (64, 8), 128, 1),
    "one key head": _case(8192, (8, 1), 128, 1),
    "full D128 512": _case(512, (16, 16), 128, 16, causal=False),
    "full D128 8k": _case(8192, (32, 8), 128, 1, causal=False),
    "causal D64 1k": _case(1024, (32, 8), 64, 16),
    "causal D64 16k": _case(16384, (16, 4), 64, 1),
    "full D64 4k": _case(4096, (32, 8), 64, 2, causal=False),
    "causal D256 1k": _case(1024, (16, 8), 256, 8),
    "causal D256 16k": _case(16384, (8, 4), 256, 1),
    "full D256 4k": _case(4096, (16, 16), 256, 2, causal=False),
    "full D256 512": _case(512, (16, 16), 256, 16, causal=False),
    "soft cap D128": _case(4096, (32, 8), 128, 2, cap=30.0),
    "soft cap D256 8k": _case(8192, (16, 8), 256, 1, cap=50.0),
    "D192/128 8k": Case(batch=1, seq=8192, heads=(16, 16), dims=(192, 128)),
    "window 1k D256": _case(8192, (8, 4), 256, 2, window=1024),
    "causal D128 512": _case(512, (32, 8), 128, 16),
    "causal D64 512": _case(512, (16, 16), 64, 16),
    "causal D96": _case(4096, (32, 32), 96, 2),
    "causal D80": _case(4096, (32, 32), 80, 2),
    "causal D128 3001": _case(3001, (16, 16), 128, 2),
    "full D64 577": _case(577, (16, 16), 64, 64, causal=False),
    "float32 D64 2k": _case(2048, (8, 8), 64, 2, dtype="float32"),
    "float32 D128 4k": _case(4096, (16, 4), 128, 2, dtype="float32"),
    "float32 D64 577": _case(577, (12, 12), 64, 16, causal=False, dtype="float32"),
    "float32 D136 8k": _case(8192, (64, 8), 136, 1, dtype="float32"),
    "float32 D64 40k": _case(40000, (1, 1), 64, 1, dtype="float32"),
    "D512 one key head": _case(2048, (8, 1), 512, 2),
    "window 128 D64 sinks": _case(4096, (64, 8), 64, 1, window=128, sinks=True),
    "window 256 D64": _case(8192, (32, 8), 64, 1, window=256),
    "triangle": _case(256, (4, 4), 32, 256, causal=False, shared=True),
}

# Few random cases are of these kinds; only the grid of the choice has them.
GRID_CASES = {
    "window 512 D64 2k": _case(2048, (16, 2), 64, 8, window=512),
    "window 1k D64 4k": _case(4096, (16, 4), 64, 4, window=1024),
    "window 1k D64 8k": _case(8192, (32, 4), 64, 1, window=1024),
    "window 256 D64 1k": _case(1024, (8, 2), 64, 32, window=256),
    "causal D64 2k one key head": _case(2048, (8, 1), 64, 8),
    "full D64 4k one key head": _case(4096, (4, 1), 64, 2, causal=False),
    "full D64 6k": _case(6144, (8, 8), 64, 1, causal=False),
    "full D120 4k": _case(4096, (16, 2), 120, 2, causal=False),
    "full D104 3000": _case(3000, (8, 8), 104, 4, causal=False),
    "full D72 4k": _case(4096, (16, 4), 72, 2, causal=False),
    "causal D40 3000": _case(3000, (8, 8), 40, 4),
    "full D256 3383": _case(3383, (8, 8), 256, 2, causal=False),
    "full D256 3001": _case(3001, (16, 4), 256, 1, causal=False),
    "full D240 2500": _case(2500, (8, 8), 240, 2, causal=False),
    "full D64 8k": _case(8192, (4, 4), 64, 1, causal=False),
    "full D64 4k two heads": _case(4096, (2, 2), 64, 4, causal=False),
    "full D64 512 four heads": _case(512, (4, 4), 64, 64, causal=False),
    "causal D112 1k": _case(1024, (4, 4), 112, 16),
    "window 64 D32 2k": _case(2048, (4, 4), 32, 16, window=64),
    "window 64 D64 4k": _case(4096, (8, 2), 64, 4, window=64),
    "window 128 D64 2k": _case(2048, (8, 8), 64, 8, window=128),
    "window 256 D96 4k": _case(4096, (8, 8), 96, 2, window=256),
    "window 64 D104 one head": _case(4096, (1, 1), 104, 16, window=64),
    "window 64 D128 4k": _case(4096, (8, 8), 128, 2, window=64),
    "window 128 D128 4k": _case(4096, (8, 8), 128, 2, window=128),
    "window 128 D128 shared keys": _case(4096, (16, 8), 128, 2, window=128),
    "window 256 D128 shared keys": _case(4096, (16, 4), 128, 2, window=256),
    "window 256 D256 1k": _case(1024, (4, 4), 256, 16, window=256),
    "causal D128 1k shared keys": _case(1024, (16, 2), 128, 16),
    "causal D128 1500": _case(1500, (32, 8), 128, 6),
    "causal D96 768": _case(768, (8, 2), 96, 24),
    "float16 causal D128 1k": _case(1024, (16, 2), 128, 8, dtype="float16"),
    "float16 causal D128 1k one key head": _case(1024, (8, 1), 128, 24, dtype="float16"),
    "float16 causal D128 1k four key heads": _case(1024, (16, 4), 128, 16, dtype="float16"),
    "float16 causal D128 2k": _case(2048, (16, 2), 128, 4, dtype="float16"),
    "float16 causal D120 900": _case(900, (16, 2), 120, 16, dtype="float16"),
}


def drawn(seed: int, number: int) -> Case:
    """Return a case drawn at random from the kinds that models use; the same for the same numbers."""
    rng = np.random.default_rng((seed, number))

    def one_of(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    kind = one_of("plain", "plain", "odd", "float32", "window", "cap", "segments", "lengths", "unequal", "triangle")
    if kind == "triangle":
        alike, seq = int(one_of(4, 8)), int(rng.integers(16, 97)) * 8
        return _case(seq, (alike, alike), int(one_of(16, 32, 64)), max(1, 65536 // seq), causal=False, bias=True)
    dim = int(one_of(64, 128, 256)) if rng.random() < 0.5 else int(rng.integers(4, 33)) * 8
    groups = int(one_of(1, 2, 4, 8))
    heads = (groups * int(one_of(1, 4, 8)), groups)
    seq = int(one_of(512, 1024, 2048, 4096, 8192))
    if kind == "odd" or rng.random() < 0.2:
        seq = int(rng.integers(300, 6000))
    batch = max(1, min(64, 2**28 // (seq * seq * heads[0])))
    more: dict[str, Any] = {"causal": bool(rng.random() < 0.6)}
    if kind == "float32":
        more["dtype"] = "float32"
    if kind == "window":
        more |= {"causal": True, "window": int(one_of(128, 512, 1024, 4096))}
    if kind == "cap":
        more["cap"] = float(one_of(20.0, 50.0))
    if kind == "segments":
        more["segments"] = _segments(rng, seq, int(rng.integers(1, 12)))
    if kind == "lengths":
        more |= {"causal": False, "lengths": True}
    dims = (dim, int(one_of(64, 128))) if kind == "unequal" else (dim, dim)
    return Case(batch=batch, seq=seq, heads=heads, dims=dims, **more)


def drawn_names(seed: int, count: int) -> list[str]:
    """Return names of drawn cases, as `case_named` takes them; they say what the case is."""
    return [f"{seed}.{number} {words_of(drawn(seed, number))}" for number in range(count)]


# Draws are in this order, so that a short one has every kind; the grid of the choice keeps the narrower `drawn`.
KINDS = (
    *("plain", "odd", "float32", "window", "cap", "segments", "unequal", "triangle"),
    *("gqa", "lengths", "narrow", "odd", "wide", "sinks", "float16", "pair"),
)


def widely_drawn(seed: int, number: int) -> Case:
    """Return a random case of the kind `KINDS[number % len(KINDS)]`; the same for the same numbers."""
    rng, kind = np.random.default_rng((seed, number)), KINDS[number % len(KINDS)]

    def one_of(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    if kind in ("triangle", "pair"):
        alike, dim = int(one_of(4, 8, 16)), int(one_of(16, 24, 32, 48, 64))
        seq = int(rng.integers(128, 769)) if kind == "pair" else _multiple_of_8(rng, 640) + 128
        batch = max(1, int(one_of(2**14, 2**16)) // seq) if kind == "triangle" else int(rng.integers(1, 9))
        return _case(seq, (alike, alike), dim, batch, causal=False, shared=True)
    dim = int(one_of(64, 128, 256)) if rng.random() < 0.3 else _multiple_of_8(rng, 256)
    groups = int(one_of(1, 2, 4, 8))
    heads = (groups * int(one_of(4, 7, 8) if kind == "gqa" else one_of(1, 1, 4, 8)), groups)
    seq = int(one_of(512, 1024, 2048, 4096, 8192))
    causal = bool(rng.random() < 0.6)
    if kind in ("odd", "unequal") or rng.random() < 0.25:
        seq = int(rng.integers(300, 6000))
    more = {"causal": causal} | _features(rng, kind, seq)
    if kind in ("window", "sinks"):
        seq = max(seq, 2 * more["window"])
    if kind == "wide":
        dim, seq, heads = int(one_of(320, 384, 512, 576)), min(seq, 2048), (heads[0], 1)
    if kind == "narrow":
        dim = _multiple_of_8(rng, 56)
    batch = max(1, min(64, 2**28 // (seq * seq * heads[0]), 2**26 // (seq * heads[0] * dim)))
    dims = (dim, _multiple_of_8(rng, 256)) if kind == "unequal" else (dim, dim)
    return Case(batch=batch, seq=seq, heads=heads, dims=dims, **more)


def _features(rng: np.random.Generator, kind: str, seq: int) -> dict[str, Any]:
    """Return the fields of a drawn case that make its kind."""
    if kind in ("float32", "float16"):
        return {"dtype": kind}
    if kind in ("window", "sinks"):
        window = (64, 128, 256, 512, 1024)[rng.integers(5)]
        return {"causal": True, "window": window, "sinks": kind == "sinks"}
    if kind == "cap":
        return {"cap": (20.0, 50.0)[rng.integers(2)]}
    if kind == "segments":
        return {"segments": _segments(rng, seq, int(rng.integers(1, 16)))}
    return {"causal": False, "lengths": True} if kind == "lengths" else {}


def _segments(rng: np.random.Generator, seq: int, cuts: int) -> tuple[int, ...]:
    """Return the lengths of the segments between cuts at random positions."""
    places = np.sort(rng.choice(np.arange(1, seq), cuts, replace=False))
    return tuple(int(x) for x in np.diff(np.concatenate([[0], places, [seq]])))


def _multiple_of_8(rng: np.random.Generator, most: int) -> int:
    return 8 * int(rng.integers(1, most // 8 + 1))


def widely_drawn_names(seed: int, count: int, kinds: Sequence[str] = KINDS) -> list[str]:
    """Return names of such cases, as `case_named` takes them; only of these kinds."""
    numbers = (number for number in itertools.count() if KINDS[number % len(KINDS)] in kinds)
    return [f"{seed}-{number} {words_of(widely_drawn(seed, number))}" for number in itertools.islice(numbers, count)]


def small_names(seed: int, count: int) -> list[str]:
    """Return names of random calls with few tiles: most multiprocessors of a GPU would have none, or one."""
    rng = np.random.default_rng(seed)
    names: list[str] = []
    while len(names) < count:
        dim = int(rng.choice((64, 128, 256))) if rng.random() < 0.3 else _multiple_of_8(rng, 256)
        groups = int(rng.choice((1, 2, 4, 8)))
        heads = (groups * int(rng.choice((1, 1, 4))), groups)
        short = rng.random() < 0.25
        usual = [512, 1024, 2048, 4096, int(rng.integers(256, 6000))] if not short else [int(rng.integers(40, 256))]
        seq = int(rng.choice(usual))
        batch = int(rng.choice((1, 1, 2, 4)))
        window = int(rng.choice((128, 512))) if rng.random() < 0.15 and seq >= 1024 else None
        causal = window is not None or bool(rng.random() < 0.5)
        lengths = not causal and bool(rng.random() < 0.3)
        if batch * heads[0] * -(-seq // 64) <= 4 * MULTIPROCESSORS:
            dims = (dim, dim)
            case = Case(batch=batch, seq=seq, heads=heads, dims=dims, causal=causal, window=window, lengths=lengths)
            names.append(words_of(case))
    return names


def short_names(seed: int, count: int) -> list[str]:
    """Return names of random calls with many short sequences, such as windows or frames of a model of images."""
    rng = np.random.default_rng(seed)
    names = []
    for _ in range(count):
        dim = int(rng.choice((32, 64, 128))) if rng.random() < 0.5 else _multiple_of_8(rng, 128)
        groups = int(rng.choice((1, 3, 4, 8, 12, 16)))
        heads = (groups * int(rng.choice((1, 1, 1, 4))), groups)
        seq, keys = (int(2 ** rng.uniform(2, 7.1)) for _ in range(2))
        batch = max(1, int(2 ** rng.uniform(12, 19)) // (seq * heads[0]))
        kind = str(rng.choice(("plain", "plain", "causal", "cross", "lengths", "shared", "float16", "float32")))
        case = Case(
            batch=batch,
            seq=seq,
            heads=heads,
            dims=(dim, dim),
            causal=kind == "causal",
            other=keys if kind == "cross" else None,
            lengths=kind == "lengths",
            shared=kind == "shared",
            dtype=kind if kind.startswith("float") else "bfloat16",
        )
        names.append(words_of(case))
    return names


def case_named(name: str) -> Case:
    """Return a fixed case, a drawn one, or one in the words of `words_of`."""
    fixed = CASES | GRID_CASES
    if name in fixed:
        return fixed[name]
    found = _IN_WORDS.fullmatch(name)
    if found is not None:
        return _case_in_words(found)
    draw = widely_drawn if "-" in name.split()[0] else drawn
    seed, number = name.split()[0].replace("-", ".").split(".")
    return draw(int(seed), int(number))


_IN_WORDS = re.compile(
    r"(?P<rule>causal|full) B(?P<batch>\d+) T(?P<seq>\d+)(?:/(?P<keys>\d+))? H(?P<heads>\d+)/(?P<groups>\d+) "
    r"D(?P<dim>\d+)(?:/(?P<value_dim>\d+))?(?P<bias> bias)?"
    r"(?P<lengths> lengths)?(?P<mask> mask)?(?: (?P<dtype>float16|float32))?(?P<shared> shared bias, mask)?"
    r"(?P<sinks> sinks)?(?: window (?P<window>\d+))?(?: cap (?P<cap>\d+))?(?: (?P<segments>\d+) segments)?"
)


def _case_in_words(found: re.Match[str]) -> Case:
    """Return the case whose words are `found`; the lengths of its segments are random, and depend on their number."""
    batch, seq, heads, groups, dim = map(int, found.group("batch", "seq", "heads", "groups", "dim"))
    segments = int(found["segments"] or 0)
    return Case(
        batch=batch,
        seq=seq,
        heads=(heads, groups),
        dims=(dim, int(found["value_dim"] or dim)),
        causal=found["rule"] == "causal",
        window=None if found["window"] is None else int(found["window"]),
        cap=None if found["cap"] is None else float(found["cap"]),
        bias=found["bias"] is not None,
        lengths=found["lengths"] is not None,
        mask=found["mask"] is not None,
        shared=found["shared"] is not None,
        dtype=found["dtype"] or "bfloat16",
        sinks=found["sinks"] is not None,
        segments=_segments(np.random.default_rng(segments), seq, segments - 1) if segments else (),
        other=None if found["keys"] is None else int(found["keys"]),
    )


def words_of(case: Case) -> str:
    """Return a description of a case, e.g. `causal B16 T600 H8/8 D128 window 64`."""
    (heads, groups), (dim, value_dim) = case.heads, case.dims
    other = "" if case.other is None else f"/{case.other}"
    words = ["causal" if case.causal else "full", f"B{case.batch} T{case.seq}{other} H{heads}/{groups} D{dim}"]
    words[1] += f"/{value_dim}" if value_dim != dim else ""
    words += ["bias"] * case.bias + ["lengths"] * case.lengths + ["mask"] * case.mask
    words += [case.dtype] * (case.dtype != "bfloat16")
    words += ["shared bias, mask"] * case.shared + ["sinks"] * case.sinks
    words += [] if case.window is None else [f"window {case.window}"]
    words += [] if case.cap is None else [f"cap {case.cap:g}"]
    return " ".join([*words, *[f"{len(case.segments)} segments"] * bool(case.segments)])
