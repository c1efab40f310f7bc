# SPDX-License-Identifier: Apache-2.0
"""Settings for processes that compile many small programs; with `-p tests.quick`, searches are short as well."""

from __future__ import annotations

import os

import pytest

# Tests spend most of their time in XLA, and run each small program once. So XLA optimises less, compiles a program in
# one piece, and emits loops without MLIR (newer versions ignore this option). The user's own flags come last, so they
# take precedence.
_FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)


def start():
    """Set the environment, before JAX starts, of this process and of those that it starts."""
    os.environ["XLA_FLAGS"] = " ".join((*_FLAGS, os.environ.get("XLA_FLAGS", ""))).rstrip()
    # On the small matrices of a search, NumPy's threads would wait for each other longer than they work.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_configure():
    """Set the environment; only `make doctest` loads this module as a plugin."""
    start()


@pytest.fixture(autouse=True)
def brief_searches():
    """Limit the searches of examples to three candidates and to a check of the outputs; other tests cover searches."""
    from ejkernel.ops import policy_override

    with policy_override(max_candidates=3, validate="outputs"):
        yield
