# SPDX-License-Identifier: Apache-2.0
"""The number of our functions that run in the first call of an operation: the path of a reader through the code."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# Of the framework: without the operation itself (`kernels/`), and without JAX. Lower these limits, never raise them.
FUNCTIONS, FILES = 305, 45

PROGRAM = """
import json, pathlib, sys
import jax.numpy as jnp
import ejkernel
from ejkernel.modules import flash_attention

source, seen = str(pathlib.Path(ejkernel.__file__).parent) + "/", set()

def note(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(source) and not code.co_name.startswith("<"):
        seen.add((code.co_filename.removeprefix(source), code.co_firstlineno))

x = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
sys.setprofile(note)
flash_attention(x, x, x, causal=True)
sys.setprofile(None)
print(json.dumps(sorted(seen)))
"""


@pytest.mark.slow
def test_the_first_call_of_an_operation_passes_few_functions(tmp_path):
    env = {**os.environ, "EJKERNEL_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
    passed = [(file, line) for file, line in json.loads(done.stdout) if not file.startswith("kernels/")]
    files = {file for file, _ in passed}
    assert {"modules/flash_attention.py", "ops/core/primitive.py", "ops/config/selection.py"} <= files
    assert len(passed) <= FUNCTIONS
    assert len(files) <= FILES
