"""Variants of the whole step of some shapes, interleaved, and lists of their kernels."""
import functools, sys, time
import concurrent.futures
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from benchmarks import linear_cross_entropy_hopper as B
from ejkernel import compat
from ejkernel.compat import executables
from ejkernel.kernels.linear_cross_entropy.mosaic_gpu import gradients as G, kernel as K

START = time.time()
SECONDS = float(sys.argv[1]) if __name__ == "__main__" else 0.0  # until the measurements stop
NAMES = sys.argv[2:] if __name__ == "__main__" else []
Base = K.HeadKernel
MAGIC = 12582912.0
COEFFICIENTS = (0.009570101276040077, 0.05591785907745361, 0.240247443318367, 0.6931217908859253, 0.9999992847442627)

def exp2_by_fma(x):
    shifted = x + MAGIC
    f = x - (shifted - MAGIC)
    p = f * COEFFICIENTS[0] + COEFFICIENTS[1]
    for k in COEFFICIENTS[2:]:
        p = p * f + k
    bits = lax.bitcast_convert_type(p, jnp.int32) + (lax.bitcast_convert_type(shifted, jnp.int32) << 23)
    return lax.bitcast_convert_type(bits, jnp.float32)

class Poly(Base):
    def _exponentials(self, product, tile, has_label, relative_to):
        self._store_label(product, tile, has_label)
        plan, unit, total = self.plan, self._unit, None
        for i in range(plan.pieces):
            piece, squashed = self._logits(product, tile, i)
            s = piece * (unit * K.LOG2E) - K._wide(relative_to)
            e = exp2_by_fma(s) if i % 2 else jnp.exp2(s)
            self._store_piece(e * self._slope(squashed), tile, i)
            total = e if total is None else total + e
        self._store_part("total", tile, total.sum(axis=1))

SLOTS = dict(stages=3, out_slots=4)
HALF = {"Q": dict(chunk=8192, accumulation_dtype="bfloat16"), "G": dict(chunk=4096, accumulation_dtype="bfloat16")}
def steps(name):
    """Return parameters, the kernel's class and the number of sampled columns, by name."""
    half = HALF.get(name, dict(chunk=None))
    found = {"default": ({}, Base, 256), "slots": (half | SLOTS, Base, 256)}
    if name == "G":
        found |= {"poly, slots": (half | SLOTS, Poly, 256)}
    return found

def lists(run):
    ext = executables._cupti()
    ext._cupti_init()
    jax.block_until_ready(run())
    return ext._cupti_get_timings(False)

def lowered(name, placed=lambda x: x, arrays=None):
    shape = B.SHAPES[name]
    S = jax.ShapeDtypeStruct
    T, d, V = shape.tokens, shape.inner, shape.columns
    kinds = arrays or [placed(S(s, t)) for s, t in (((T, d), "bfloat16"), ((V, d) if shape.transpose_weight else (d, V), "bfloat16"), ((T,), "int32"), ((T,), "float32"))]
    found = {}
    for label, (params, K.HeadKernel, G.SAMPLED) in steps(name).items():
        found[label] = jax.jit(B.ours(shape, "trained", **params)).lower(*kinds)
    K.HeadKernel, G.SAMPLED = Base, 256
    found["products"] = jax.jit(B.products_alone(shape, "trained")).lower(*kinds, placed(S((T, V), "bfloat16")))
    return found

def main():
    arrays = {n: B.arrays_of(B.SHAPES[n]) for n in NAMES}
    programs, samples = {}, {}
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        jobs = {}
        for n in NAMES:
            for label, l in lowered(n, arrays=list(arrays[n])).items():
                jobs[n, label] = pool.submit(l.compile)
        for (n, label), job in jobs.items():
            try:
                p, shape = job.result(), B.SHAPES[n]
                more = [jax.random.normal(jax.random.key(1), (shape.tokens, shape.columns), jnp.bfloat16)] if label == "products" else []
                run = functools.partial(p, *arrays[n], *more)
                out = jax.tree.leaves(jax.block_until_ready(run()))
                m = p.memory_analysis()
                if label == "default":
                    first = out
                off = [] if "poly" not in label else [f"{float(B.relative_error(a, b)):.2e}" for a, b in zip(out, first)]
                print(n, label, "peak MiB", (m.temp_size_in_bytes + m.output_size_in_bytes) >> 20, "from default", off, flush=True)
                programs[n, label] = run
                del out
            except Exception as error:
                print(n, label, "FAILED", str(error)[:300], flush=True)
        first = None
    print("compiled", round(time.time() - START, 1), flush=True)
    samples = {key: [] for key in programs}
    order = np.random.default_rng(0)
    rounds = 0
    while rounds < 2 or (time.time() - START < SECONDS and rounds < 15):
        rounds += 1
        for n in NAMES:
            keys = [key for key in programs if key[0] == n]
            for i in order.permutation(len(keys)):
                samples[keys[i]].append(B.seconds_per_call(programs[keys[i]], 3))
    print("rounds", rounds, flush=True)
    for (n, label), run in programs.items():
        s = samples[n, label]
        base = samples.get((n, "products"), s)
        ratio = np.median(np.array(s) / np.array(base))
        print(f"{n} | {label:20s} | {1e6*np.median(s):8.0f} us | {1e6*min(s):8.0f} best | {ratio:.4f} x products", flush=True)
    for (n, label), run in programs.items():
        time.sleep(0.15)
        found = lists(run)
        print(f"{n} {label}: {sum(ms for _, ms in found)*1e3:.0f} us cool:", ", ".join(f"{k[:34]} {1e3*ms:.0f}" for k, ms in found if ms > 0.004), flush=True)

if __name__ == "__main__":
    main()
