# SPDX-License-Identifier: Apache-2.0
"""What the text of a lowered program says about its kernels."""

from __future__ import annotations

import re


def assert_in_place_calls_are_apart(text):
    """Check that XLA cannot move a slice into a call that updates an operand in place: it would forget the update.

    Operands come from barriers or other kernels, and results go there; updated operands may come from anywhere.
    """
    lines = text.splitlines()
    apart = [line for line in lines if "optimization_barrier" in line or "custom_call @mosaic" in line]
    made = {_name(line) for line in apart}
    reshaped = dict(re.findall(r"(%\w+) = stablehlo.reshape (%\w+)", text))
    calls = [line for line in apart if "output_operand_alias" in line]
    assert calls
    for call in calls:
        operands = re.search(r"custom_call @\w+\(([^)]*)\)", call)[1].split(", ")
        updated = {int(number) for number in re.findall(r"operand_index = (\d+)", call)}
        names = {operand.partition("#")[0] for i, operand in enumerate(operands) if i not in updated}
        assert {reshaped.get(name, name) for name in names} <= made
        uses = {line for line in lines if line != call and re.search(rf"{_name(call)}#\d", line)}
        assert uses
        assert uses <= {*apart}


def _name(line):
    return re.match(r"\s*(%\w+)", line)[1]
