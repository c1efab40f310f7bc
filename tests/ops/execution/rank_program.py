# SPDX-License-Identifier: Apache-2.0
"""One process of `test_ranks.py`: `python rank_program.py PORT INDEX COUNT FOLDER`.

It prints each question with its answer, as a line of JSON.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ejkernel import compat
from ejkernel.ops import (
    AgreementError,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    ShardingRule,
    configuration_digest,
    overlay_cache,
)


class Times(Kernel[int, jax.Array]):
    """`cfg * x`, so that a sum over all devices tells the configuration of every process."""

    def run(self, x, *, cfg):
        return cfg * x

    def heuristic_cfg(self, inv):
        return 1


class Split(Times):
    """The same; each device computes a shard."""

    def sharding_rule(self, inv):
        return ShardingRule("n -> n", split="n")


class Rank:
    """This process."""

    def __init__(self, index, count, folder):
        self.index, self.count, self.folder = index, count, Path(folder)
        self.alive = (self.folder / f"{index}.alive").open("w")
        fcntl.flock(self.alive, fcntl.LOCK_EX)  # until this process ends
        self.chain = ConfigSelectorChain()
        self.executor = Executor(self.chain)
        mesh = Mesh(np.array(jax.devices()), ("a",))
        spread, one = NamedSharding(mesh, PartitionSpec("a")), np.arange(1, 1 + len(jax.devices()), dtype=np.float32)
        self.x = jax.make_array_from_callback(one.shape, spread, lambda part: one[part])
        self.mesh, self.weight = mesh, float(one.sum())
        self.service = compat.processes.coordination_store().client
        self.meet("all alive")

    def kernel(self, name, own=None):
        """Return an operation; this process may have its own configuration for it."""
        kernel = Times(name)
        self.key = Invocation(kernel=kernel, args=(self.x,)).key
        if own is not None:
            self.chain.cache.put(self.key, own)
        return kernel

    def program(self, kernel):
        return jax.jit(lambda x: jnp.sum(self.executor(kernel, x)))

    def local_program(self, kernel):
        """A program with a known mesh, and a call on each device."""

        def local(x):
            return jax.lax.psum(jnp.sum(self.executor(kernel, x)), "a")

        spec = PartitionSpec("a")
        return jax.jit(jax.shard_map(local, mesh=self.mesh, in_specs=spec, out_specs=PartitionSpec()))

    def run(self, kernel, make=None):
        """Return the configuration of all processes, from the sum over their devices."""
        return float((make or self.program)(kernel)(self.x)) / self.weight

    def lower(self, kernel):
        self.program(kernel).lower(self.x)

    def outlive(self, other):
        """Return when another process has ended."""
        with (self.folder / f"{other}.alive").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)

    def meet(self, name):
        self.service.wait_at_barrier(name, 60_000)


# --- each a question; all processes ask them in this order ---


def differing_caches(rank):
    return rank.run(rank.kernel("caches", 10 + rank.index))


def differing_caches_under_shard_map(rank):
    kernel = rank.kernel("mapped")
    part = jax.ShapeDtypeStruct((1,), rank.x.dtype)
    rank.chain.cache.put(Invocation(kernel=kernel, args=(part,)).key, 10 + rank.index)
    return rank.run(kernel, rank.local_program)


def differing_caches_of_a_call_that_is_split(rank):
    kernel = Split("split")
    part = jax.ShapeDtypeStruct((1,), rank.x.dtype)
    rank.chain.cache.put(Invocation(kernel=kernel, args=(part,)).key, 10 + rank.index)
    return rank.run(kernel)


def orders_of_lowering(rank):
    """Lower some calls in a different order in each process, then run them in one order."""
    kernels = [rank.kernel(f"ordered_{n}", 100 * n + rank.index) for n in range(6)]
    programs = [rank.program(kernel) for kernel in kernels]
    lowered = {}
    for n in random.Random(rank.index).sample(range(6), 6):
        lowered[n] = programs[n].lower(rank.x)
    return [float(lowered[n].compile()(rank.x)) / rank.weight for n in range(6)]


def lowered_by_one_alone(rank):
    """Lower a call in the last process only; it does not wait, and its decision holds for the others."""
    kernel = rank.kernel("alone", 20 + rank.index)
    if rank.index == rank.count - 1:
        rank.lower(kernel)
    rank.meet("alone")
    return rank.run(kernel)


def own_device(rank):
    """Run a call on this process's own device, with its own configuration."""
    kernel = rank.kernel("own")
    own = jnp.ones(3)
    rank.chain.cache.put(Invocation(kernel=kernel, args=(own,)).key, 30 + rank.index)
    return float(jax.jit(lambda x: rank.executor(kernel, x))(own)[0]) - rank.index


def overlay_in_all(rank):
    kernel = rank.kernel("overlaid", 40 + rank.index)
    program, found = rank.program(kernel), []
    for overlay in ({}, {rank.key: 3}, {}, {rank.key: 4}):
        with overlay_cache(overlay):
            found.append(float(program(rank.x)) / rank.weight)
    return [found[0] == found[2], found[1], found[3]]


def overlay_in_one(rank):
    """Enter an overlay in process 1 only, the last to lower: it raises, and no process hangs."""
    kernel = rank.kernel("odd_one")
    if rank.index != 1:
        rank.lower(kernel)
    rank.meet("odd one")
    if rank.index != 1:
        return "lowered"
    with overlay_cache({rank.key: 5}):
        try:
            rank.lower(kernel)
        except AgreementError as error:
            return str(error)
    return "lowered otherwise"


def retuned(rank):
    """Change the caches after a call was decided, and compile it again."""
    kernel = rank.kernel("retuned", 50)
    before = rank.run(kernel)
    rank.chain.cache.put(rank.key, 60 + rank.index)
    return [before, rank.run(kernel)]


def digests(rank):
    rank.meet("digests")
    differences = [configuration_digest().difference(configuration_digest(p)) for p in range(rank.count)]
    own = str(configuration_digest())
    rank.meet("digests read")  # before another process lowers the next call
    return [own, sum(map(len, differences))]


def after_a_death(rank):
    """Lower new calls when the last process has ended without a word."""
    last = rank.count - 1
    if rank.index == last:
        os.kill(os.getpid(), signal.SIGKILL)
    rank.outlive(last)
    for n in range(3):
        rank.lower(rank.kernel(f"after_{n}", rank.index))
    used = configuration_digest().keys
    return [used[call] for call in sorted(used) if call.startswith("after")]


QUESTIONS = (
    differing_caches,
    differing_caches_under_shard_map,
    differing_caches_of_a_call_that_is_split,
    orders_of_lowering,
    lowered_by_one_alone,
    own_device,
    overlay_in_all,
    retuned,
    digests,
    overlay_in_one,
    after_a_death,
)


def main():
    port, index, count = map(int, sys.argv[1:4])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
    rank = Rank(index, count, sys.argv[4])
    for question in QUESTIONS:
        print(json.dumps([question.__name__, question(rank)]), flush=True)
    if index == 0:  # this process runs the service, and JAX ends processes that lose it
        for other in range(1, count):
            rank.outlive(other)
    os._exit(0)  # skip JAX's shutdown, which would wait for a killed process


if __name__ == "__main__":
    main()
