# SPDX-License-Identifier: Apache-2.0
"""What ptxas reports about the kernels; needs JAX's plugin for CUDA and the compiler, but no GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.kernels import compiler

pytestmark = pytest.mark.slow

MIXED = ["mixed", "mixed, all options, head_dim 64", "mixed, int8"]
SPILLED = re.compile(r"Function properties for (\w+)_mosaic_gpu_kernel\n.* (\d+) bytes spill stores")

USED = re.compile(r"Function properties for paged_attention_mosaic_gpu_kernel\n.*\n.*Used (\d+) registers")
TWO_BLOCKS = 65_536 // (2 * 256)  # registers of a thread, if two blocks of threads share a multiprocessor

PREFILL, LATENT = "paged_attention_prefill", "latent_attention"


def test_no_kernel_spills_registers_except_prefill_and_latent_and_two_blocks_of_decode_share_a_multiprocessor():
    compiled = compiler.printed_for(Path(__file__).parent / "compiled_for_hopper.py")
    assert len(compiled) == 12
    spilled = {name: dict(SPILLED.findall(text)) for name, text in compiled.items()}
    assert [name for name, kernels in spilled.items() if PREFILL in kernels] == ["few tokens", *MIXED]
    for name, kernels in spilled.items():
        if name.startswith("latent"):  # between items, outside of the loop over keys
            assert int(kernels.pop(LATENT)) <= 64
            assert kernels == {f"{LATENT}_sums": "0"}
            continue
        assert "paged_attention" in kernels
        assert int(kernels.pop(PREFILL, 0)) <= 32
        assert set(kernels.values()) == {"0"}
    registers = {name: int(USED.findall(text)[0]) for name, text in compiled.items() if not name.startswith("latent")}
    many_rows = {"decode, 64 heads per KV head", "few tokens"}
    assert {name for name, used in registers.items() if used > TWO_BLOCKS} <= many_rows
