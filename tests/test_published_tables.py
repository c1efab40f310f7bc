# SPDX-License-Identifier: Apache-2.0
"""`scripts/published_tables.py` imports blocks from a checkout, here a made-up one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "scripts" / "published_tables.py"

pytestmark = pytest.mark.skipif(not FILE.exists(), reason="a source tree has the script")

ATTENTION = {
    "q": "bf16[4,1024,16,128]",
    "k": "bf16[4,1024,8,128]",
    "v": "bf16[4,1024,8,128]",
    "return_residuals": False,
}
ATTENTION |= {"bias": None, "mask": {"bool_mask": None, "causal_mask": {"offset": 0, "window_size": None}}}
BLOCKS = {"block_q": 512, "block_kv": 1024, "block_kv_compute": 256, "use_base2_exp": True}
SIZES = {"num_groups": 8, "total_size": 1024}
PRODUCT = {"lhs": "bf16[1024,512]", "rhs": "bf16[8,512,256]", "group_sizes": SIZES, "return_residuals": False}
PRODUCT |= {"ragged_dot_dimension_numbers": {"dot_dimension_numbers": [[[1], [1]], [[], []]]}}
PRODUCT |= dict.fromkeys(("activation", "fuse_gateup_activation", "group_offset"))
TILES = {"tile_m": 128, "tile_k": 512, "tile_n": 256, "input_buffer_count": 2}


@pytest.fixture
def imported(tmp_path, capsys):
    """Import tables of one chip; return the rows of each table, and the printed lines."""
    spec = importlib.util.spec_from_file_location("published_tables", FILE)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def run(**tables):
        folder = tmp_path / "tokamax" / "data" / "autotuning" / "tpu_v5"
        folder.mkdir(parents=True)
        for name, rows in tables.items():
            found = {
                json.dumps(asked): {json.dumps(blocks): {"evaluation_times_ms": [2.0, 1.0, 3.0]}} if blocks else {}
                for asked, blocks in rows
            }
            (folder / f"{name}.json").write_text(json.dumps(found))
        script.main([str(tmp_path / "tokamax"), "tokamax 1.2", "2026-01-31", "--out", str(tmp_path)])
        rows = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in script.TABLES}
        return {name: found["tokamax 1.2, 2026-01-31"] for name, found in rows.items()}, capsys.readouterr().out

    return run


def test_a_row_has_the_facts_of_the_call_and_the_median_beside_xlas(imported):
    rows, _ = imported(pallas_mosaic_tpu_flash_attention=[(ATTENTION, BLOCKS)])
    call = {"device": "tpu:tpu_v5", "queries": 1024, "keys": 1024, "head_dim": 128, "value_dim": 128}
    params = {"block_q": 512, "block_kv": 1024, "block_kv_compute": 256}
    assert rows["splash"] == [{"call": call | {"causal": 1, "backward": 0}, "params": params, "us": 2000.0}]


def test_times_of_xla_come_from_the_table_of_the_same_call(imported):
    rows, _ = imported(pallas_mosaic_tpu_ragged_dot=[(PRODUCT, TILES)], ragged_dot=[(PRODUCT, {"any": 1})])
    (row,) = rows["megablox"]
    assert row["params"] == {"block_m": 128, "block_k": 512, "block_n": 256}
    assert row["xla_us"] == 2000.0


def test_backward_rows_have_the_parameters_of_one_fused_kernel(imported):
    blocks = {"block_q_dkv": 512, "block_kv_dkv": 1024, "block_kv_dkv_compute": 256}
    rows, _ = imported(pallas_mosaic_tpu_flash_attention_vjp=[(ATTENTION | {"dout": "bf16[4,1024,16,128]"}, blocks)])
    (row,) = rows["splash"]
    params = {"block_q": 512, "block_kv": 1024, "block_kv_compute": 256, "block_q_dq": None, "block_kv_dq": None}
    assert (row["params"], row["call"]["backward"]) == (params, 1)


@pytest.mark.parametrize(
    ("asked", "blocks", "reason"),
    [
        ({}, {}, "no single fastest configuration"),
        ({"return_residuals": True}, BLOCKS, "a second time, with residuals"),
        ({"bias": "bf16[1,16,1024,1024]"}, BLOCKS, "a bias, a mask, dropout"),
        ({"q": "f32[4,1024,16,128]"}, BLOCKS, "another dtype than bfloat16"),
        ({"mask": {"causal_mask": {"offset": 0, "window_size": 64}}}, BLOCKS, "a window"),
        ({}, BLOCKS | {"block_q": 100}, "block_q must be"),
        (
            dict.fromkeys("qkv", "bf16[1,8192,8,512]"),
            dict.fromkeys(BLOCKS, 8192),
            "it takes at least N bytes of vector memory",
        ),
    ],
)
def test_rows_that_do_not_fit_are_skipped_with_the_reason(imported, asked, blocks, reason):
    fitting = ({**ATTENTION, "q": "bf16[1,1024,16,128]"}, BLOCKS)
    if asked.get("mask"):
        asked = {"mask": {"bool_mask": None} | asked["mask"]}
    rows, printed = imported(pallas_mosaic_tpu_flash_attention=[fitting, ({**ATTENTION, **asked}, blocks)])
    assert len(rows["splash"]) == 1
    assert f"1 rows skipped, flash_attention: {reason}" in printed


@pytest.mark.parametrize(
    ("asked", "blocks", "reason"),
    [
        ({"group_sizes": [1024, 0, 0, 0]}, TILES, "uneven groups"),
        ({}, TILES | {"input_buffer_count": 3}, "more than two buffers"),
        ({"rhs": {"qvalue": "f8_e4m3fn[8,512,256]"}}, TILES, "quantised operands"),
        ({"activation": "silu"}, TILES, "an epilogue"),
        (
            {"ragged_dot_dimension_numbers": {"dot_dimension_numbers": [[[1], [2]], [[], []]]}},
            TILES,
            "a transposed matrix",
        ),
    ],
)
def test_products_that_the_kernel_does_not_compute_are_skipped(imported, asked, blocks, reason):
    rows, printed = imported(pallas_mosaic_tpu_ragged_dot=[({**PRODUCT, **asked}, blocks)])
    assert not rows["megablox"]
    assert f"1 rows skipped, ragged_dot: {reason}" in printed


def test_products_with_contracted_rows_are_weights_gradients(imported):
    numbers = {"dot_dimension_numbers": [[[0], [0]], [[], []]]}
    asked = PRODUCT | {"rhs": "bf16[1024,256]", "ragged_dot_dimension_numbers": numbers}
    rows, _ = imported(pallas_mosaic_tpu_ragged_dot=[(asked, TILES)])
    ((row,), empty) = rows["megablox_wgrad"], rows["megablox"]
    assert (row["call"]["inner"], row["call"]["columns"], empty) == (512, 256, [])
