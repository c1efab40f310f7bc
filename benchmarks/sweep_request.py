# SPDX-License-Identifier: Apache-2.0
import sys, os
from pathlib import Path
from benchmarks.attention_choice import *
from ejkernel.kernels.flash_attention.mosaic_gpu.params import ForwardParams as F, BackwardParams as B
def names(seed, count, most):
    out=[]
    for n in drawn_names(seed,count):
        c=case_named(n)
        if c.dtype!="bfloat16" or c.cap or c.segments or c.bias or c.dims[0]!=c.dims[1]: continue
        out.append(n)
    return out[:most]
def variants():
    f=[]
    odd=["24.%d"%i for i in ()]
    case="7.17 "
    base=dict(kv_block=64, share_buffer=True, ping_pong=False)
    for v in (base, base|dict(kv_block=80), base|dict(kv_block=80,ping_pong=True), base|dict(ping_pong=True), base|dict(heads_first=True), base|dict(persistent=True), base|dict(persistent=True,heads_first=True), base|dict(kv_block=80,persistent=True,heads_first=True)):
        f.append(("7.17 x",F(**v)))
    for c in ("window 128 D64 sinks","window 256 D64"):
        for v in (dict(persistent=True,query_buffers=2,share_buffer=True), dict(pack_heads=True), dict(pack_heads=True,kv_block=64,stages=3), dict(pack_heads=True,kv_block=64,stages=3,persistent=True,query_buffers=2,share_buffer=True), dict(kv_block=64,stages=3), dict(kv_block=64,stages=3,persistent=True,query_buffers=2,share_buffer=True), dict(persistent=True,query_buffers=2,share_buffer=True,warpgroups=3), dict(kv_block=64, stages=3,persistent=True,query_buffers=2,share_buffer=True,ping_pong=False), dict(kv_block=64,stages=3,pack_heads=True,persistent=True,query_buffers=2,share_buffer=True,ping_pong=False), dict(kv_block=96,persistent=True,query_buffers=2,share_buffer=True),dict(kv_block=64,stages=3,warpgroups=1,ping_pong=False)):
            f.append((c,F(**v)))
    return f
if __name__=="__main__":
    cases=[*names(24,140,56),"window 128 D64 sinks","window 256 D64","triangle","D512 one key head","causal D80","causal D96","full D64 577","causal D128 3001","7.17 full","7.3 full","7.33 full","7.25 causal","7.38 causal","7.0 full","7.12 full","7.20 full","7.26 full","7.15 full","bias"]
    if len(sys.argv)<2:
        from collections import Counter
        print(len(cases)); print(*cases,sep="\n"); sys.exit()
    every=[Direction(c,d,n,None) for c in cases for d in DIRECTIONS for n in contenders_of(case_named(c))]
    extra=[Direction(case_name if not case_name.startswith("7.17") else "7.17 full","fwd","mosaic_gpu",None,p) for case_name,p in variants()]
    run([],9,None,Path(sys.argv[1]),every+extra)
