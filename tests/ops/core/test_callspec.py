# SPDX-License-Identifier: Apache-2.0
"""Calls taken apart: matching arguments to the signature of `run`, and joining them again."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from ejkernel.ops import ConfigSelectorChain, Executor, Kernel, KernelError
from ejkernel.ops.core.callspec import take_apart

ONE, TWO, THREE = (np.float32(value) for value in (1, 2, 3))


class Sum(Kernel[int, np.ndarray]):
    def run(self, a, b=None, c=None, *, cfg, scale=1):
        return (a + (0 if b is None else b) + (0 if c is None else c)) * scale

    def heuristic_cfg(self, inv):
        return 1


def taken(kernel, *args, **kwargs):
    """Return the arguments of the kernel after a round trip."""
    spec, arrays = take_apart(kernel, args, kwargs)
    return spec.join(arrays)


@pytest.mark.parametrize(
    ("args", "kwargs", "positional", "keywords"),
    [
        ((ONE,), {}, (ONE,), {}),
        ((ONE, TWO), {"scale": 2}, (ONE, TWO), {"scale": 2}),
        ((), {"a": ONE}, (ONE,), {}),
        ((ONE,), {"b": TWO}, (ONE, TWO), {}),
        ((ONE,), {"c": THREE}, (ONE, None, THREE), {}),
        ((), {"c": THREE, "a": ONE, "scale": 2}, (ONE, None, THREE), {"scale": 2}),
    ],
)
def test_a_keyword_for_a_positional_parameter_becomes_positional(args, kwargs, positional, keywords):
    assert taken(Sum(), *args, **kwargs) == (positional, keywords)


def test_an_omitted_default_is_the_same_call_as_an_explicit_one():
    kernel = Sum()
    assert take_apart(kernel, (ONE,), {"c": THREE}) == take_apart(kernel, (ONE, None, THREE), {})


def test_arguments_that_do_not_fit_name_the_operation():
    with pytest.raises(TypeError, match="Sum: missing a required argument: 'a'"):
        take_apart(Sum(), (), {})


class LastIsConfig(Sum):
    def run(self, a, b, cfg):
        return a + b + cfg


def test_cfg_may_be_a_plain_last_parameter():
    executor = Executor(ConfigSelectorChain())
    assert float(executor(LastIsConfig(), ONE, TWO)) == 4
    assert float(executor(LastIsConfig(), ONE, b=TWO, cfg=5)) == 8


class ConfigFirst(Sum):
    def run(self, a, cfg, b=0):
        return a + b + cfg


class NoConfig(Sum):
    def run(self, a):
        return a


@pytest.mark.parametrize("kernel", [ConfigFirst(), NoConfig()], ids=str)
def test_a_run_that_cannot_take_cfg_by_keyword_is_an_error(kernel):
    with pytest.raises(KernelError, match=r"run must take cfg as a keyword argument: def run\(self, ..., \*, cfg\)"):
        take_apart(kernel, (ONE,), {})


SUM = Sum()


def of_the_module(x):
    return x


def test_a_call_with_a_function_among_its_arguments_is_pickled():
    """Calls travel to the processes that measure them."""
    spec, _ = take_apart(SUM, (ONE, of_the_module, 1.0), {"scale": True})
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    assert again.statics[1:] == (of_the_module, 1.0, True)
