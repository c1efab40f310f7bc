# SPDX-License-Identifier: Apache-2.0
"""Gradient rules that cannot be called as they are, and functions that JAX cannot differentiate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from ejkernel.ops import CacheWarning, Executor, Kernel, KernelError, default_executor, tune

X = jnp.ones(8)


class Product(Kernel[int, jax.Array]):
    def run(self, x, w, *, cfg, flag=False):
        return x * w

    def heuristic_cfg(self, inv):
        return 1


def with_hooks(name, **hooks):
    return type(name, (Product,), hooks)(name)


RULE = r"custom_vjp must have the signature custom_vjp\(self, primals, cfg, kwargs, cotangents\), got "
KERNELS = {
    "two_arguments": ({"custom_vjp": lambda self, primals, cotangents: cotangents}, RULE + r".*\(self, primals, cotan"),
    "those_of_run": ({"custom_vjp": lambda self, x, w, cfg, g: (g, g)}, RULE + ".*: cfg is argument 2, not 3"),
    "another_order": (
        {"custom_vjp": lambda self, primals, kwargs, cfg, cotangents: (None, None)},
        RULE + ".*: cfg is argument 2, not 3",
    ),
    "forward_without_cfg": (
        {"fwd_with_residuals": lambda self, x, w: (x * w, x), "vjp": lambda self, *args, **kwargs: (None, None)},
        r"the signature fwd_with_residuals\(self, x, w, \*, cfg, flag=False\), got .*unexpected keyword argument 'cfg'",
    ),
    "backward_as_in_jax": (
        {"fwd_with_residuals": lambda self, x, w, *, cfg: (x * w, x), "vjp": lambda self, residuals, g: (g, g)},
        r"the signature vjp\(self, residuals, out, cotangents, x, w, \*, cfg, flag=False\), got .*\(self, residuals, g",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_a_gradient_rule_with_a_wrong_signature_is_an_error_with_the_right_one(name):
    hooks, message = KERNELS[name]
    kernel = with_hooks(name, **hooks)
    with pytest.raises(KernelError, match=message):
        jax.grad(lambda x: kernel(x, x).sum())(X)


def test_a_type_error_inside_a_rule_is_unchanged():
    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        raise TypeError("its own")

    with pytest.raises(TypeError, match=r"^its own"):
        jax.grad(lambda x: with_hooks("raises", custom_vjp=custom_vjp)(x, X).sum())(X)


def test_names_of_a_rules_arguments_are_its_own():
    def custom_vjp(self, p, c, k, g):
        return g[0] * p[1], g[0] * p[0]

    found = jax.grad(lambda x: with_hooks("other_names", custom_vjp=custom_vjp)(x, 2 * X).sum())(X)
    assert found.tolist() == [2.0] * 8


def doubled(x_ref, out_ref):
    out_ref[...] = x_ref[...] * (2.0 + pl.program_id(0))


def by_pallas(x, rows):
    block = pl.BlockSpec((rows,), lambda i: (i,))
    grid = (x.shape[0] // rows,)
    return pl.pallas_call(doubled, out_shape=x, grid=grid, in_specs=[block], out_specs=block, interpret=True)(x)


@tune(space={"rows": [4, 8]}, name="blocks_without_a_rule")
def in_blocks(x, *, rows=8):
    return by_pallas(x, rows)


@pytest.mark.parametrize("saved", [None, {"rows": 4}], ids=["heuristic", "saved"])
def test_differentiating_a_pallas_function_without_a_rule_is_an_error_with_the_fix(saved):
    executor: Executor = default_executor()
    if saved is not None:
        executor.chooser.persistent.put(executor.explain(in_blocks, X).key, saved)
    message = "blocks_without_a_rule.bwd: the kernel has no gradient rule, and JAX could not differentiate its run: .*"
    with pytest.raises(KernelError, match=f"{message}jax.custom_vjp inside the function"):
        jax.grad(lambda x: in_blocks(x).sum())(X)  # a warning would be an error: no other configuration would help


def test_a_saved_configuration_that_alone_cannot_be_differentiated_gives_way_to_the_heuristic():
    @tune(space={"pallas": [False, True]}, name="sometimes_in_blocks")
    def sometimes(x, *, pallas=False):
        return by_pallas(x, 4) if pallas else 2.0 * x

    executor: Executor = default_executor()
    executor.chooser.persistent.put(executor.explain(sometimes, X).key, {"pallas": True})
    with pytest.warns(CacheWarning, match="which does not run"):
        found = jax.grad(lambda x: sometimes(x).sum())(X)
    assert found.tolist() == [2.0] * 8
