# SPDX-License-Identifier: Apache-2.0
"""Compilation of a call for a device of another process."""

from __future__ import annotations

import re

import jax

from ejkernel import compat
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.autotuner.trials.candidates import Program, program_digest
from ejkernel.ops.core.examples import example_types
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.transformations.nodes import Choice
from ejkernel.ops.core.types import Cfg, Out

# XLA chooses algorithms for these by timing on the device, and chooses badly without one. A bundle with such programs
# would compare kernels with a handicapped XLA.
_TUNED_BY_XLA = re.compile(r"stablehlo\.(dot|convolution)|__cudnn|__cublas")
_MOSAIC = re.compile(r"mosaic_gpu")


def compile_for(inv: Invocation[Cfg, Out], choice: Choice, target: Target, *, only_once: bool = False) -> Program:
    """Compile a call for a target. Works in any process.

    Args:
        inv: The call, for the target.
        choice: The implementation and configuration.
        target: The device.
        only_once: The program runs once, so compile it even if XLA would tune it on the device.
    """
    types = [target.placed(like) for like in example_types(inv)]
    with target.entered(), compat.numerics(inv.numerics):
        try:
            lowered = jax.jit(inv.node.flat(choice)).lower(*types)
        except RuntimeError as error:
            if target.description and "Unknown backend" in str(error):  # e.g. a host callback
                return Program(why_left="lowering it needs the device")
            raise
        text = lowered.as_text()
        digest = program_digest(text)
        if digest is None:
            return Program(why_left="it calls back into the process that compiles it")
        if target.description and _TUNED_BY_XLA.search(text) and not only_once:
            return Program(digest=digest, why_left="XLA tunes some of its operations on the device")
        code = compat.serialized(lowered.compile())
    outputs = len(jax.tree.leaves(lowered.out_info))
    return Program(digest=digest, code=code, inputs=len(types), outputs=outputs, mosaic=bool(_MOSAIC.search(text)))
