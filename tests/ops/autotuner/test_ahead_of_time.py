# SPDX-License-Identifier: Apache-2.0
"""Programs compiled in one process and run in another."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops.autotuner.compile.targets import Target, compile_for
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.core.transformations.nodes import Choice
from ejkernel.ops.errors import TuningError

HERE = Target.named("here")


def made(run, *args):
    class Plain(Kernel[int, jax.Array]):
        def heuristic_cfg(self, inv):
            return 0

    Plain.run = lambda self, *args, cfg: run(*args)
    inv = Invocation(kernel=Plain("plain"), args=args).abstract()
    return compile_for(inv, Choice(config=0, platform="cpu"), HERE)


def test_a_compiled_program_is_loaded_and_runs():
    x = np.arange(6, dtype=np.float32)
    program = made(lambda x: (x * 3, x.sum()), x)
    assert (program.why_left, program.inputs, program.outputs, program.mosaic) == ("", 1, 2, False)
    tripled, total = program.load()(x)
    assert tripled.tolist() == (x * 3).tolist()
    assert float(total) == 15.0


def test_a_program_is_for_the_first_device():
    program = made(lambda x: x + 1, np.ones(3, np.float32))
    with (
        jax.default_device(jax.devices()[-1]),
        pytest.raises(TuningError, match=r"only on the first device, not on .*; .*CUDA_VISIBLE_DEVICES"),
    ):
        program.load()


@pytest.mark.parametrize("offset", [1.0, 2.0])
def test_programs_with_different_constants_differ(offset):
    constant = np.arange(1000, dtype=np.float32) + offset
    x = np.ones(1000, np.float32)
    program = made(lambda x: x + jnp.asarray(constant), x)
    assert program.digest != made(lambda x: x + jnp.asarray(constant + 1), x).digest
    assert program.load()(x)[0].tolist() == (x + constant).tolist()


def test_a_program_with_callbacks_is_left_and_has_no_twin():
    def run(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    program = made(run, np.ones(3, np.float32))
    assert (program.digest, program.code) == ("", None)
    assert "calls back into the process" in program.why_left
