# SPDX-License-Identifier: Apache-2.0
"""What makes processes quick that compile many small programs; `-p tests.quick` has searches be quick as well."""

from __future__ import annotations

import os

import pytest

# Most of the time of tests is XLA's, and what it makes of small programs runs once: let it try less, compile each in
# one piece, and write loops as it did before it went through MLIR (an option that newer versions ignore). Flags that
# were given come last, so they win.
_FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)


def start():
    """Set the environment, before JAX starts, of this process and of those that it starts."""
    os.environ["XLA_FLAGS"] = " ".join((*_FLAGS, os.environ.get("XLA_FLAGS", ""))).rstrip()
    # NumPy's threads wait for each other longer than they work on matrices as small as a search's.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_configure():
    """Called for `make doctest` alone, which has this module as a plugin."""
    start()


@pytest.fixture(autouse=True)
def brief_searches():
    """Have examples search among three candidates and compare outputs alone: other tests are about searches."""
    from ejkernel.ops import policy_override

    with policy_override(max_candidates=3, validate="outputs"):
        yield
