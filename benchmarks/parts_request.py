"""Times of variants of one shape's exponentials kernel, and of the whole step with a list of its kernels."""
import functools, sys, time
import concurrent.futures
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from benchmarks import linear_cross_entropy_hopper as B
from benchmarks.linear_cross_entropy_hopper import SHAPES, arrays_of, logits_of, seconds_per_call
from ejkernel import compat
from ejkernel.compat import executables
from ejkernel.kernels.linear_cross_entropy.mosaic_gpu import kernel as K, plan as P

name = sys.argv[1]
ROUNDS = int(sys.argv[2])
shape = SHAPES[name]
T, d, V = shape.tokens, shape.inner, shape.columns
Base = K.HeadKernel
MAGIC = 12582912.0

def exp2_by_fma(x):
    """2**x for |x| < 126 on the FMA units."""
    shifted = x + MAGIC
    f = x - (shifted - MAGIC)
    p = 1.3334e-3 * 7.2
    c = (0.009618129, 0.0555041, 0.24022651, 0.6931472, 1.0)
    p = c[0]
    for k in c[1:]:
        p = p * f + k
    bits = lax.bitcast_convert_type(p, jnp.int32) + (lax.bitcast_convert_type(shifted, jnp.int32) << 23)
    return lax.bitcast_convert_type(bits, jnp.float32)

def poly(pieces):
    class Poly(Base):
        def _exponentials(self, product, tile, has_label, relative_to):
            self._store_label(product, tile, has_label)
            plan, unit, total = self.plan, self._unit, None
            for i in range(plan.pieces):
                piece, squashed = self._logits(product, tile, i)
                s = piece * (unit * K.LOG2E) - K._wide(relative_to)
                e = exp2_by_fma(s) if i in pieces else jnp.exp2(s)
                self._store_piece(e if plan.soft_cap is None else e * self._slope(squashed), tile, i)
                total = e if total is None else total + e
            self._store_part("total", tile, total.sum(axis=1))
    return Poly

def plan(mode=P.EXPONENTIALS, last=V, **k):
    base = dict(block_n=256, stages=4, panel=16, out_slots=2); base |= k
    return P.HeadPlan(mode=mode, rows=T, inner=d, columns=V, last=last, transpose_weight=shape.transpose_weight,
                      soft_cap=shape.soft_cap, scale=1.0, bias=False, **base)

VARIANTS = {
    "exp": (Base, {}),
    "exp, 3 stages": (Base, dict(stages=3)),
    "exp, 3 stages, 4 slots": (Base, dict(stages=3, out_slots=4)),
    "exp, 1 slot": (Base, dict(out_slots=1)),
    "exp, 3 stages, 4 slots, panel 8": (Base, dict(stages=3, out_slots=4, panel=8)),
    "exp, 3 stages, 4 slots, panel 32": (Base, dict(stages=3, out_slots=4, panel=32)),
}
if shape.soft_cap:
    VARIANTS |= {"exp, 1 by fma": (poly((1,)), {}), "exp, 2 by fma": (poly((1, 3)), {}),
                 "exp, 2 by fma, 4 slots": (poly((1, 3)), dict(stages=3, out_slots=4)),
                 "exp, all by fma": (poly((0, 1, 2, 3)), {})}

STEPS = {
    "step": {}, "step, 3 stages, 4 slots": dict(stages=3, out_slots=4), "products": None,
}
if name in "GQ":
    half = dict(chunk=T // 2, accumulation_dtype="bfloat16")
    STEPS |= {"step, float32 sum": dict(chunk=T // 4), "step, all rows": dict(chunk=None, panel=16)}

def lists(run):
    ext = executables._cupti()
    ext._cupti_init()
    jax.block_until_ready(run())
    return ext._cupti_get_timings(False)

def main():
    x, w, labels, factors = arrays_of(shape)

    def table(pl):
        parts = lax.broadcasted_iota(jnp.int32, labels.shape, 0) // 64
        tiles = jnp.where(labels >= 0, labels // pl.block_n, pl.column_tiles)
        return jnp.zeros((T // 64, pl.column_tiles), jnp.int32).at[parts, tiles].set(1, mode="drop")

    @jax.jit
    def largest(x, w):
        wl = w[::V // 256] if shape.transpose_weight else w[:, ::V // 256]
        s = logits_of(shape, x, wl).astype(jnp.float32).max(axis=1)
        return s if shape.soft_cap is None else shape.soft_cap * jnp.tanh(s / shape.soft_cap)

    rel = largest(x, w) * K.LOG2E
    normal = jax.random.normal(jax.random.key(1), (T, V), jnp.bfloat16)
    jobs = {}
    for label, (cls, k) in VARIANTS.items():
        K.HeadKernel, pl = cls, plan(**k)
        args = [x, w, labels, table(pl), rel]
        jobs[label] = (jax.jit(lambda *a: K.run_head(pl, a)).lower(*args), args)
    K.HeadKernel = Base
    jobs["cuBLAS logits"] = (jax.jit(lambda x, w: logits_of(shape, x, w)).lower(x, w), (x, w))
    for label, params in STEPS.items():
        more = [normal] if params is None else []
        f = B.products_alone(shape, "trained") if params is None else B.ours(shape, "trained", **params)
        args = [x, w, labels, factors, *more]
        jobs[label] = (jax.jit(f).lower(*args), args)
    programs = {}
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        futures = {n: pool.submit(l.compile) for n, (l, a) in jobs.items()}
        first = None
        for n, f in futures.items():
            try:
                p = f.result(); a = jobs[n][1]
                out = jax.block_until_ready(p(*a))
                programs[n] = functools.partial(p, *a)
                if n == "exp":
                    first = out
                elif n.startswith("exp"):
                    e, t = (jax.jit(B.relative_error)(out[i], first[i]) for i in (-1, 0))
                    print(name, n, "differs from exp by", float(e), float(t), flush=True)
                else:
                    m = p.memory_analysis()
                    print(name, n, "peak MiB", (m.temp_size_in_bytes + m.output_size_in_bytes) >> 20, flush=True)
                del out
            except Exception as error:
                print(name, n, "FAILED", str(error)[:300], flush=True)
        del first
    print("compiled", flush=True)
    samples = {n: [] for n in programs}
    order = np.random.default_rng(0)
    for _ in range(ROUNDS):
        for n in order.permutation(list(programs)):
            samples[n].append(seconds_per_call(programs[n], 4 if n in STEPS else 12))
    for n, run in programs.items():
        time.sleep(0.2)
        k = compat.cupti_seconds(run)
        print(f"{name} | {n:34s} | {1e6*np.median(samples[n]):9.0f} us sustained | {1e6*min(samples[n]):9.0f} best | {1e6*(k or 0):9.0f} cool", flush=True)
    for n in STEPS:
        if n in programs:
            time.sleep(0.2)
            print(name, n, flush=True)
            for kernel, ms in lists(programs[n]):
                print(f"    {1e3*ms:9.1f} us  {kernel[:70]}", flush=True)

if __name__ == "__main__":
    main()
