# SPDX-License-Identifier: Apache-2.0
"""The machine code of our normalisations of short rows; their registers are estimated from shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kernels import compiler

pytestmark = pytest.mark.slow


def test_nothing_is_spilled():
    compiled = compiler.printed_for(Path(__file__).with_name("compiled_for_hopper.py"))
    assert len(compiled) == 16
    assert compiler.spilling(compiled) == []
