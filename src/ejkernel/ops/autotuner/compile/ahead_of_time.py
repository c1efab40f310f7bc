# SPDX-License-Identifier: Apache-2.0
"""Programs compiled in one process and run in another, which has the device."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax

from ejkernel import compat
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.autotuner.trials.candidates import program_digest
from ejkernel.ops.autotuner.trials.outcome import READY
from ejkernel.ops.core.examples import example_types
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.nodes import Choice
from ejkernel.ops.errors import TuningError
from ejkernel.ops.utils.fingerprint import default_device

LEFT = "left"  # the fate of a program that must be compiled where it runs
# XLA chooses how to compute these by timing on the device, and chooses badly where there is none.
_TUNED_BY_XLA = re.compile(r"stablehlo\.(dot|convolution)|__cudnn|__cublas")
_MOSAIC = re.compile(r"mosaic_gpu")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A program that was compiled, or left to be compiled where it runs.

    Attributes:
        digest: What tells it from others; empty if nothing does.
        payload: Its machine code; empty if it is left.
        inputs: How many arrays it takes.
        outputs: How many it returns.
        mosaic: Whether it needs the runtime of Mosaic GPU.
        spilled: Bytes of registers that a thread of it spills to memory, as far as that is known.
        status: `ready` or `left`.
        reason: Why it is left.
    """

    digest: str
    payload: bytes = b""
    inputs: int = 0
    outputs: int = 0
    mosaic: bool = False
    spilled: int | None = None
    status: str = READY
    reason: str = ""

    def load(self) -> Any:
        """Return the program, ready to run on the default device."""
        return load_program(self.payload, inputs=self.inputs, outputs=self.outputs, mosaic=self.mosaic)


def load_program(payload: bytes, *, inputs: int, outputs: int, mosaic: bool) -> Any:
    """Return the program that the bytes are the machine code of.

    Raises:
        TuningError: the default device is not the first, which is the one that programs are compiled for.
    """
    if not is_first(default_device()):
        raise TuningError(
            f"a program that another process compiled runs on the first device alone, not on {default_device()}; let "
            "this process see no other, such as with CUDA_VISIBLE_DEVICES."
        )
    if mosaic:
        _bring_mosaic_runtime()
    return compat.loaded(payload, inputs=inputs, outputs=outputs)


def is_first(device: jax.Device) -> bool:
    """Return whether it is the device that programs which are compiled elsewhere run on."""
    return int(device.id) == 0


@functools.cache
def _bring_mosaic_runtime() -> None:
    compat.load_mosaic_gpu_runtime()


def compile_for(inv: Invocation[Any, Any], choice: Choice, target: Target, *, only_once: bool = False) -> Made:
    """Compile a call for a target; this may run in any process.

    Args:
        inv: The call, for the target.
        choice: How it is computed.
        target: The device.
        only_once: It need not be fast, so that it is compiled even where XLA would tune it on the device.
    """
    types = [target.placed(like) for like in example_types(inv)]
    with target.entered(), compat.numerics(inv.numerics):
        try:
            lowered = jax.jit(inv.node.flat(choice)).lower(*types)
        except RuntimeError as error:
            if target.description and "Unknown backend" in str(error):  # as a call back to the host does
                return Made(digest="", status=LEFT, reason="it wants the device while it is lowered")
            raise
        text = lowered.as_text()
        digest = program_digest(text)
        if digest is None:
            return Made(digest="", status=LEFT, reason="it calls back to the host of the process that compiles it")
        if target.description and _TUNED_BY_XLA.search(text) and not only_once:
            return Made(digest=digest, status=LEFT, reason="XLA tunes a part of it on the device")
        payload = compat.serialized(lowered.compile())
    outputs = len(jax.tree.leaves(lowered.out_info))
    return Made(digest=digest, payload=payload, inputs=len(types), outputs=outputs, mosaic=bool(_MOSAIC.search(text)))
