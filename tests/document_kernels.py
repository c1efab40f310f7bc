# SPDX-License-Identifier: Apache-2.0
"""The kernels and arrays that the examples of the documents assume."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops import Kernel


@dataclasses.dataclass(frozen=True)
class MyConfig:
    block_size: int = 128
    num_warps: int = 4
    algorithm: str = "default"


class Matmul(Kernel[MyConfig, jax.Array]):
    def run(self, a, b, *, cfg):
        return jnp.dot(a, b)

    def heuristic_cfg(self, inv):
        return MyConfig()

    def config_space(self, inv):
        return [MyConfig(block_size=64), MyConfig(block_size=128)]


class Double(Kernel[MyConfig, jax.Array]):
    def run(self, x, *, cfg):
        return x + x

    def heuristic_cfg(self, inv):
        return MyConfig()


MATMUL, DOUBLE = Matmul(), Double()
A, B = np.ones((8, 16), np.float32), np.full((16, 4), 2.0, np.float32)
X = np.arange(4.0, dtype=np.float32)
