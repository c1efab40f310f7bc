# SPDX-License-Identifier: Apache-2.0
"""Train a small language model with experts in bfloat16 and in FP8, and compare the loss curves.

    python examples/eight_bit_training/eight_bit_training.py

Each recipe trains the same models: one per seed, with its own initial parameters and data. The curves agree if the mean
losses of FP8 and bfloat16 differ by less than the spread between seeds.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import DelayedScaling, grouped_matmul, quantized_dense, quantized_grouped_dense

RECIPES = ("bfloat16", "current scaling", "delayed scaling", "blocks")


class Size(NamedTuple):
    """Sizes of the model and of a step."""

    words: int = 64
    context: int = 4
    width: int = 64
    experts: int = 4
    tokens: int = 256


Parameters = dict[str, jax.Array]
Histories = dict[str, DelayedScaling]


def parameters(size: Size, key: jax.Array) -> Parameters:
    """Return initial parameters, in float32."""
    shapes = {
        "words": (size.words, size.width),
        "enter": (size.context * size.width, size.width),
        "router": (size.width, size.experts),
        "up": (size.experts, size.width, 2 * size.width),
        "down": (size.experts, 2 * size.width, size.width),
        "leave": (size.width, size.words),
    }
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(key, shape) * shape[-2] ** -0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def _block(recipe: str) -> Literal[128] | None:
    return 128 if recipe == "blocks" else None


def experts(recipe: str, own: Parameters, x: jax.Array) -> jax.Array:
    """Return each row, processed by the expert that its router prefers."""
    product: Callable[..., jax.Array] = grouped_matmul
    if recipe != "bfloat16":
        product = functools.partial(quantized_grouped_dense, block=_block(recipe))
    chances = jax.nn.softmax((x @ own["router"]).astype(jnp.float32))
    chosen = jnp.argmax(chances, axis=-1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=own["up"].shape[0])
    rows = product(jax.nn.silu(product(x[order], own["up"], sizes)), own["down"], sizes)
    weight = jnp.take_along_axis(chances, chosen[:, None], axis=-1).astype(x.dtype)
    return rows[jnp.argsort(order)] * weight


def loss(recipe: str, own: Parameters, histories: Histories, tokens: jax.Array) -> jax.Array:
    """Return the mean loss of the last word of each row of `tokens`."""
    own = {name: x.astype(jnp.bfloat16) for name, x in own.items()}

    def dense(name: str, x: jax.Array) -> jax.Array:
        if recipe == "bfloat16":
            return x @ own[name]
        return quantized_dense(x, own[name], scaling=histories.get(name), block=_block(recipe))

    x = own["words"][tokens[:, :-1]].reshape(tokens.shape[0], -1)
    x = jax.nn.silu(dense("enter", x))
    x = x + experts(recipe, own, x)
    logits = dense("leave", x).astype(jnp.float32)
    chances = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(chances, tokens[:, -1:], axis=-1).mean()


def text(size: Size, key: jax.Array) -> jax.Array:
    """Return rows of words; the last depends on the two before it, with some noise."""
    of_words, of_noise, of_change = jax.random.split(key, 3)
    words = jax.random.randint(of_words, (size.tokens, size.context), 0, size.words)
    following = (3 * words[:, -1] + 7 * (words[:, -2] % 4)) % size.words
    noise = jax.random.randint(of_noise, following.shape, 0, size.words)
    changed = jax.random.bernoulli(of_change, 0.05, following.shape)
    return jnp.concatenate([words, jnp.where(changed, noise, following)[:, None]], axis=1)


def trained(recipe: str, size: Size, steps: int, key: jax.Array) -> jax.Array:
    """Return the loss of each step."""
    of_parameters, of_text = jax.random.split(key)
    delayed = recipe == "delayed scaling"
    histories = {name: DelayedScaling.start(8) for name in ("enter", "leave")} if delayed else {}
    own = parameters(size, of_parameters)

    def step(carry: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        own, momentum, histories = carry
        value_and_gradients: Callable[..., Any] = jax.value_and_grad(functools.partial(loss, recipe), (0, 1))
        # The "gradient" of a history is the history for the next step.
        value, (gradients, histories) = value_and_gradients(own, histories, text(size, key))
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
        return (jax.tree.map(lambda p, m: p - 0.1 * m, own, momentum), momentum, histories), value

    start = own, jax.tree.map(jnp.zeros_like, own), histories
    return jax.lax.scan(step, start, jax.random.split(of_text, steps))[1]


def compared(size: Size, steps: int, seeds: int) -> dict[str, Any]:
    """Return the mean loss of the last steps for each recipe, its spread between seeds, and the curves' distance."""
    keys = [jax.random.key(seed) for seed in range(seeds)]
    found, curves = {}, {}
    for recipe in RECIPES:
        train = jax.jit(functools.partial(trained, recipe, size, steps))
        curves[recipe] = np.stack([np.asarray(train(key)) for key in keys])
        last = curves[recipe][:, -steps // 8 :].mean(axis=1)
        found[recipe] = {"first": float(curves[recipe][:, 0].mean()), "last": float(last.mean())}
        found[recipe]["spread"] = float(last.std(ddof=1))
    for recipe in RECIPES[1:]:
        differences = (curves[recipe] - curves["bfloat16"])[:, -steps // 8 :].mean(axis=1)
        found[recipe]["difference"] = float(differences.mean())
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the losses; fail if the curves disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="training steps (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="models per recipe (default: %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="width of the model (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="rows of a step (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args(argv)
    if args.seeds < 2:
        parser.error(f"--seeds must be at least 2, for a spread; got {args.seeds}")
    found = compared(Size(width=args.width, tokens=args.tokens), args.steps, args.seeds)
    if args.json:
        print(json.dumps(found))
    for recipe, row in found.items():
        difference = f", {row['difference']:+.4f} against bfloat16" if "difference" in row else ""
        print(f"{recipe:16} loss {row['first']:.3f} -> {row['last']:.4f} ± {row['spread']:.4f}{difference}")
    noise = max(row["spread"] for row in found.values())
    agree = all(abs(row.get("difference", 0.0)) < noise for row in found.values())
    print("the curves agree within the spread between seeds" if agree else "the curves disagree")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
