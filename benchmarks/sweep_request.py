# SPDX-License-Identifier: Apache-2.0
import dataclasses
import sys
from pathlib import Path

from benchmarks.attention_choice import *
from ejkernel.kernels.flash_attention.mosaic_gpu import plan
from ejkernel.kernels.flash_attention.mosaic_gpu.params import BackwardParams as B
from ejkernel.kernels.flash_attention.mosaic_gpu.params import ForwardParams as F


@dataclasses.dataclass(frozen=True)
class Dims(Direction):
    native: tuple = (32, 64, 96, 128, 192, 256)

    def lowered(self):
        plan._NATIVE_DIMS = self.native
        return super().lowered()


P = dict(persistent=True, query_buffers=2, share_buffer=True)
CAUSAL64 = [
    F(**P), F(**P, heads_first=True), F(), F(**P, warpgroups=3), F(warpgroups=3), F(**P, warpgroups=3, heads_first=True), F(**P, kv_block=160), F(**P, kv_block=96, warpgroups=3),
    F(**P, kv_block=96), F(**P, stages=3), F(**P, kv_block=64, stages=3),
]
PACK = [F(**P, pack_heads=True), F(**P, pack_heads=True, kv_block=64, stages=3), F(pack_heads=True)]
WIDE = [F(kv_block=64, share_buffer=True), F(kv_block=64, share_buffer=True, pack_heads=True), F(kv_block=32, stages=4, share_buffer=True), F(kv_block=96, share_buffer=True), F(kv_block=64, stages=3, share_buffer=True), F(kv_block=64, share_buffer=True, persistent=True, ping_pong=True)]
WINDOW = [F(**P), F(**P, pack_heads=True), F(**P, pack_heads=True, kv_block=64, stages=3), F(**P, kv_block=64, stages=3), F(**P, pack_heads=True, kv_block=64, stages=3, ping_pong=False)]
FORWARD = {
    "24.76 x": CAUSAL64 + PACK, "24.113 x": CAUSAL64 + PACK, "7.25 x": CAUSAL64, "7.7 x": CAUSAL64 + PACK, "24.42 x": CAUSAL64, "24.67 x": WINDOW, "24.71 x": WINDOW, "24.34 x": WINDOW,
    "7.39 x": WIDE[:4], "window 1k in 16k": WINDOW, "24.39 x": WIDE, "24.98 x": WIDE, "24.70 x": WIDE, "24.87 x": WIDE,
    "24.105 x": WIDE + [F(share_buffer=True), F(share_buffer=True, ping_pong=False)],
    "24.54 x": WIDE + [F(share_buffer=True), F(share_buffer=True, ping_pong=False), F(**P)],
}
Q128, SPLIT = dict(q_block=128), dict(form="split", division="products", kv_block=64, kv_stages=1, q_warpgroups=2)
BACKWARD = {
    "24.20 x": [B(head_parts=n) for n in (2, 4, 8)],
    "7.33 x": [B(**Q128, head_parts=n) for n in (1, 2, 4)],
    "24.48 x": [B(**SPLIT, head_parts=n) for n in (1, 2, 4)],
    "24.61 x": [B(head_parts=n) for n in (2, 4)],
    "24.101 x": [B(dout_stages=1), B(q_stages=3, dout_stages=1), B(division="products"), B(form="split", kv_block=64, kv_stages=2, q_warpgroups=2)],
    "24.81 x": [B(dout_stages=1), B(division="products"), B(form="split", kv_block=64, kv_stages=2, q_warpgroups=2)],
    "24.42 x": [B(), B(warpgroups=1)],
}
OLD = (32, 64, 128, 192, 256)


def entries():
    found = []
    for case in dict.fromkeys([*FORWARD, *BACKWARD]):
        for direction, variants in (("fwd", FORWARD), ("bwd", BACKWARD)):
            if case in variants or direction == "fwd":
                found += [Dims(case, direction, name, None) for name in ("mosaic_gpu", "cudnn") if case in variants or name == "mosaic_gpu"]
            found += [Dims(case, direction, "mosaic_gpu", None, params) for params in variants.get(case, ())]
    for case in ("causal D80", "causal D96", "24.95 x", "24.45 x", "24.75 x"):
        found += [Dims(case, "fwd", "mosaic_gpu", None)]
        found += [Dims(case, "bwd", name, None) for name in ("mosaic_gpu", "cudnn")]
        found += [Dims(case, "bwd", "mosaic_gpu", None, B(), OLD)]
    return found


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print(len(entries()))
    else:
        for row in measure(entries(), 9, None):
            with Path(sys.argv[1]).open("a") as file:
                file.write(json.dumps(row) + "\n")
