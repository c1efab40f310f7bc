# SPDX-License-Identifier: Apache-2.0
"""The same winner for every way of tuning a call; times are made up, so only the context of the call differs."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from tests.ops.autotuner.made_up_times import interleaved_with
from tests.ops.sample_kernels import WithResiduals, WithRule, told_apart

from ejkernel.ops import ConfigSelectorChain, Executor, Kernel, tune
from ejkernel.ops.autotuner.bench import timing
from ejkernel.ops.autotuner.tuner import Autotuner

pytestmark = pytest.mark.slow

X = np.linspace(0.0, 1.0, 16, dtype=np.float32)
flash_attention_module = importlib.import_module("ejkernel.modules.flash_attention")
SECONDS = {0: 4.0, 1: 3.0, 2: 1.0, 3: 2.0}
WINNER = 2


@tune(space={"block": list(SECONDS)})
def sine(x, *, block=0):
    for _ in range(block):  # the programs of two configurations differ, those of their derivatives too
        x = 1.0 * x
    return told_apart(jnp.sin(x), block)


class Sin(Kernel[int, jax.Array]):
    """The same as a class, with a separately configured gradient rule."""

    def run(self, x, *, cfg):
        return told_apart(jnp.sin(x), cfg)

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return (told_apart(cotangents[0] * jnp.cos(primals[0]), cfg),)

    def heuristic_cfg(self, inv):
        return 0

    def config_space(self, inv):
        return list(SECONDS)


kept = Sin("kept")
of_another_module = WithRule("of_another_module")


@pytest.fixture(autouse=True)
def made_up_times(monkeypatch):
    """A candidate takes the seconds that its configuration is given above."""

    def time_of(config):
        return SECONDS[config["block"] if isinstance(config, dict) else config]

    monkeypatch.setattr(timing, "interleaved", interleaved_with(time_of))


def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def in_a_thread(work):
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join(60)
    return results[0]


SPEC = PartitionSpec("data")
SITUATIONS = {
    "outside": lambda call: call(X),
    "jit": lambda call: jax.jit(call)(X),
    "grad": lambda call: jax.grad(lambda x: call(x).sum())(X),
    "jit of value_and_grad": lambda call: jax.jit(jax.value_and_grad(lambda x: call(x).sum()))(X),
    "jvp": lambda call: jax.jvp(call, (X,), (X,)),
    "vmap": lambda call: jax.vmap(call)(X.reshape(4, 4)),
    "vmap of grad": lambda call: jax.vmap(jax.grad(lambda x: call(x).sum()))(X.reshape(4, 4)),
    "checkpoint": lambda call: jax.grad(lambda x: jax.checkpoint(call)(x).sum())(X),
    "scan": lambda call: jax.lax.scan(lambda carry, _: (call(carry), None), X, length=2),
    "shard_map": lambda call: jax.shard_map(call, mesh=mesh(), in_specs=SPEC, out_specs=SPEC)(X),
    "grad of shard_map": lambda call: jax.grad(
        lambda x: jax.shard_map(call, mesh=mesh(), in_specs=SPEC, out_specs=SPEC)(x).sum()
    )(X),
    "a thread": lambda call: in_a_thread(lambda: call(X)),
    "jit in a thread": lambda call: in_a_thread(lambda: jax.jit(call)(X)),
    "jit in a thread, of grad": lambda call: in_a_thread(lambda: jax.jit(jax.grad(lambda x: call(x).sum()))(X)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("kernel", [sine, Sin()], ids=["function", "class"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_same_candidate_wins_for_every_way_of_tuning(situation, kernel):
    chain = ConfigSelectorChain(autotune=True, tuner=Autotuner())
    executor = Executor(chain)
    jax.block_until_ready(SITUATIONS[situation](lambda x: executor(kernel, x)))
    found = {
        (chain.cache.remembered(key).source, cfg["block"] if isinstance(cfg, dict) else cfg)
        for key, cfg in chain.cache.items()
    }
    assert found == {("autotune", WINNER)}


@pytest.mark.parametrize("situation", ["jit", "scan", "a thread", "jit in a thread"])
def test_calls_tuned_outside_are_not_tuned_again(situation):
    chain = ConfigSelectorChain(autotune=True, tuner=Autotuner())
    executor = Executor(chain)
    executor(sine, X)
    chain.tuner = None
    before = chain.cache.items()
    jax.block_until_ready(SITUATIONS[situation](lambda x: executor(sine, x)))
    assert chain.cache.items() == before


# --- kernels sent to other processes ---


def test_a_kernel_that_its_module_keeps_is_pickled_by_name():
    kernels = sine, kept, flash_attention_module._flash_attention
    again = pickle.loads(pickle.dumps(kernels))
    assert all(copy is kernel for copy, kernel in zip(again, kernels, strict=True))


@pytest.mark.parametrize("kernel", [WithResiduals("named"), Sin()], ids=repr)
def test_another_instance_of_a_module_s_class_is_pickled_by_value(kernel):
    again = pickle.loads(pickle.dumps(kernel))
    assert again is not kernel
    assert (type(again), again.op_id_v) == (type(kernel), kernel.op_id_v)


def test_an_instance_that_another_module_keeps_is_pickled_by_value():
    again = pickle.loads(pickle.dumps(of_another_module))
    assert (type(again), again.op_id) == (WithRule, "of_another_module")


def test_a_script_s_kernel_reaches_its_worker_processes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run([sys.executable, str(script)], check=False, capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (["total@v0", "plain@v0", "guarded@v0"], "")


SCRIPT = """
    import concurrent.futures, multiprocessing
    from ejkernel.ops import Kernel, tune

    @tune(space={"rows": [1, 2]})
    def total(x, *, rows=1):
        return x.sum()

    class Plain(Kernel):
        def run(self, x, *, cfg):
            return x

    plain = Plain("plain")

    def op_of(kernel):
        return kernel.op_id_v

    if __name__ == "__main__":
        guarded = Plain("guarded")
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            print(*pool.map(op_of, [total, plain, guarded]))
"""
