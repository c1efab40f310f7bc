"""Times of the parts of one shape: kernels with epilogues taken away, and cuBLAS's products on different data."""
import functools, json, os, sys, time
import concurrent.futures
import jax, jax.numpy as jnp, numpy as np
from benchmarks.linear_cross_entropy_hopper import SHAPES, arrays_of, logits_of, seconds_per_call
from ejkernel import compat
from ejkernel.kernels.linear_cross_entropy.mosaic_gpu import kernel as K, plan as P
from ejkernel.kernels._hopper.launch import plgpu

name = sys.argv[1]
ROUNDS = int(sys.argv[2]) if len(sys.argv) > 2 else 7
shape = SHAPES[name]
T, d, V = shape.tokens, shape.inner, shape.columns
x, w, labels, factors = arrays_of(shape)
Base = K.HeadKernel

class Bare(Base):
    def _exponentials(self, product, tile, has_label, relative_to):
        for i in range(self.plan.pieces):
            self._store_piece(product[:, i * 64:(i + 1) * 64], tile, i)
        self._store_part("total", tile, relative_to)

class NoStore(Base):
    def _exponentials(self, product, tile, has_label, relative_to):
        total = None
        for i in range(self.plan.pieces):
            p = product[:, i * 64:(i + 1) * 64]
            total = p if total is None else total + p
        self._store_part("total", tile, total.sum(axis=1))

class ExpNoStore(Base):
    def _store_piece(self, values, tile, index):
        pass

def plan(mode=P.EXPONENTIALS, tw=shape.transpose_weight, cap=shape.soft_cap, last=None, **k):
    base = dict(block_n=256, stages=4, panel=16, out_slots=2); base |= k
    return P.HeadPlan(mode=mode, rows=T, inner=d, columns=V, last=V if last is None else last, transpose_weight=tw,
                      soft_cap=cap, scale=1.0, bias=False, **base)

def table(pl):
    parts = jax.lax.broadcasted_iota(jnp.int32, labels.shape, 0) // 64
    tiles = jnp.where(labels >= 0, labels // pl.block_n, pl.column_tiles)
    return jnp.zeros((T // 64, pl.column_tiles), jnp.int32).at[parts, tiles].set(1, mode="drop")

@jax.jit
def largest(x, w):
    wl = w[::V // 256] if shape.transpose_weight else w[:, ::V // 256]
    s = logits_of(shape, x, wl).astype(jnp.float32).max(axis=1)
    return s if shape.soft_cap is None else shape.soft_cap * jnp.tanh(s / shape.soft_cap)

rel = largest(x, w) * 1.4426950408889634
wo = jnp.swapaxes(w, 0, 1) + 0  # the other layout
jobs = {}
def kernel(label, pl, cls=Base):
    K.HeadKernel = cls
    ww = w if pl.transpose_weight == shape.transpose_weight else wo
    args = [x, ww, labels, table(pl)] + ([rel] if pl.mode == P.EXPONENTIALS else [])
    jobs[label] = (jax.jit(lambda *a: K.run_head(pl, a)).lower(*args), args)
    K.HeadKernel = Base

kernel("exp", plan())
kernel("statistics", plan(P.STATISTICS))
kernel("exp without cap" if shape.soft_cap else "exp as if capped", plan(cap=None if shape.soft_cap else 30.0))
kernel("exp, other layout", plan(tw=not shape.transpose_weight))
kernel("exp, no store", plan(), ExpNoStore)
kernel("bare store", plan(), Bare)
kernel("bare store, other layout", plan(tw=not shape.transpose_weight), Bare)
kernel("nothing", plan(), NoStore)
kernel("bare store, panel 8", plan(panel=8), Bare)
kernel("bare store, panel 64", plan(panel=64), Bare)
if V % 256:
    kernel("exp, whole tiles", plan(last=-(-V // 256) * 256))

fwd = lambda x, w: logits_of(shape, x, w)
dx = lambda m, w: m @ (w if shape.transpose_weight else w.T)
dw = lambda x, m: m.T @ x if shape.transpose_weight else x.T @ m
exps = jax.jit(lambda *a: K.run_head(plan(), a))(x, w, labels, table(plan()), rel)
e, total = exps[-1], exps[0].sum(axis=0)
normal = jax.random.normal(jax.random.key(1), (T, V), jnp.bfloat16)
grad = jax.jit(lambda e, t: (e.astype(jnp.float32) / t[:, None] / T).astype(jnp.bfloat16))(e, total)
left = (x / total[:, None] / T).astype(jnp.bfloat16)
for n, f, a in [("cuBLAS logits", fwd, (x, w)), ("cuBLAS logits, other layout", lambda x, wo: x @ (wo if shape.transpose_weight else wo.T), (x, wo)),
                ("dx, normal", dx, (normal, w)), ("dx, exponentials", dx, (e, w)), ("dx, gradient", dx, (grad, w)),
                ("dw, normal", dw, (x, normal)), ("dw, exponentials", dw, (left, e)), ("dw, gradient", dw, (x, grad))]:
    jobs[n] = (jax.jit(f).lower(*a), a)
del exps
programs = {}
with concurrent.futures.ThreadPoolExecutor(12) as pool:
    futures = {n: pool.submit(l.compile) for n, (l, a) in jobs.items()}
    for n, f in futures.items():
        try:
            p = f.result(); a = jobs[n][1]
            jax.block_until_ready(p(*a)); programs[n] = functools.partial(p, *a)
        except Exception as error:
            print(name, n, "FAILED", str(error)[:300], flush=True)
print("compiled", flush=True)
samples = {n: [] for n in programs}
order = np.random.default_rng(0)
for _ in range(ROUNDS):
    for n in order.permutation(list(programs)):
        samples[n].append(seconds_per_call(programs[n], 12))
for n, run in programs.items():
    time.sleep(0.3)
    k = compat.cupti_seconds(run)
    print(f"{name} | {n:28s} | {1e6*np.median(samples[n]):9.0f} us sustained | {1e6*min(samples[n]):9.0f} best | {1e6*(k or 0):9.0f} cool", flush=True)
