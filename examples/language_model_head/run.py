# SPDX-License-Identifier: Apache-2.0
"""Replace the loss of a language model, and compare values, gradients and memory.

    python examples/language_model_head/run.py [--library equinox|nnx]

`equinox_model.py` and `nnx_model.py` have both losses. The change is one line: the product of the output layer and
the loss become a call of `linear_cross_entropy`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from before_after import compare


def main() -> None:
    """Print whether both losses agree, and the memory of their temporary arrays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=["equinox", "nnx"], default="equinox")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2048)
    given = parser.parse_args()
    library: Any = importlib.import_module(f"{given.library}_model")
    model = library.model_of(given.vocabulary, given.width)
    tokens, labels = jax.random.randint(jax.random.key(1), (2, 4, given.tokens // 4), 0, given.vocabulary)
    steps = [_step(given.library, model, loss) for loss in (library.loss_with_logits, library.loss)]
    compare([(step, (tokens, labels)) for step in steps], ("with logits", "without"), "the losses")


def _step(library: str, model: Any, loss: Any) -> Any:
    """Return a function of tokens and labels that computes the loss and the gradients of all parameters."""
    combined: Any
    if library == "equinox":
        import equinox as eqx

        parameters, static = eqx.partition(model, eqx.is_array)
        combined = eqx.combine
    else:
        from flax import nnx

        static, parameters = nnx.split(model)
        combined = _merged
    return jax.jit(
        lambda tokens, labels: jax.value_and_grad(lambda p: loss(combined(p, static), tokens, labels))(parameters)
    )


def _merged(parameters: Any, definition: Any) -> Any:
    from flax import nnx

    return nnx.merge(definition, parameters)


if __name__ == "__main__":
    main()
