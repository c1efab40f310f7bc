# SPDX-License-Identifier: Apache-2.0
"""What the text of a lowered program says about its kernels."""

from __future__ import annotations

import re


def assert_in_place_calls_are_apart(text):
    """Check that XLA cannot move a slice into a call that updates an operand in place: it would forget the update.

    A barrier makes all operands but those updated, and takes all results.
    """
    calls = [line for line in text.splitlines() if "custom_call" in line and "output_operand_alias" in line]
    barriers = [line for line in text.splitlines() if "optimization_barrier" in line]
    assert calls
    for call in calls:
        result = re.match(r"\s*(%\w+)", call)[1]
        operands = re.search(r"custom_call @\w+\(([^)]*)\)", call)[1].split(", ")
        updated = {int(number) for number in re.findall(r"operand_index = (\d+)", call)}
        made = [operand for i, operand in enumerate(operands) if i not in updated]
        assert all(any(re.match(rf"\s*{name.split('#')[0]}\b", line) for line in barriers) for name in made), made
        uses = [line for line in text.splitlines() if re.search(rf"{result}(#|\b(?!:|\w| =))", line) and line != call]
        assert uses
        assert all("optimization_barrier" in line for line in uses), uses
