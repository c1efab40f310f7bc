# SPDX-License-Identifier: Apache-2.0
"""A process of a benchmark that ends without an answer."""

from __future__ import annotations

import pytest
from benchmarks.answering import AnsweringProcess


@pytest.mark.parametrize(
    ("seconds", "how"),
    [(60.0, "ended with 1"), (0.0, "took more than 0 s")],
    ids=["it crashes", "it takes too long"],
)
def test_the_error_tells_a_crash_from_the_time_limit_and_has_the_memory(seconds, how):
    process = AnsweringProcess("no_such_module", "--answer", {}, seconds, "the simulator")
    error = process("a question")["error"]
    assert error.startswith(f"the simulator {how}, and used up to 0.")
    assert error.endswith(" GiB")
