# SPDX-License-Identifier: Apache-2.0
"""Errors for natural mistakes say what to write instead."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from tests.arrays import ones

import ejkernel.ops as ops
from ejkernel.modules import rms_norm
from ejkernel.ops import (
    Implementation,
    Implementations,
    Kernel,
    Operation,
    OperationCall,
    OperationConfig,
    PersistentCache,
    autotune,
    default_executor,
)
from ejkernel.ops.errors import ArgumentError, CallError, ConfigError, KernelError, SerializationError
from ejkernel.testing import check_kernel


@dataclasses.dataclass(frozen=True)
class Rows:
    rows: int = 8


class Product(Kernel[Rows, jax.Array]):
    def run(self, x, w, *, cfg):
        return x @ w

    def heuristic_cfg(self, inv):
        return Rows()


X = ones((8, 8))


def test_a_list_in_place_of_an_array_is_named():
    with pytest.raises(TypeError) as caught:
        Product("product")([[1.0, 2.0]], X)
    assert any("pass jnp.asarray(...)" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("given", [[[1.0, 2.0]], 2.0, None])
def test_a_value_without_the_shape_of_an_array_is_explained(given):
    class ByShape(Product):
        def heuristic_cfg(self, inv):
            return Rows(inv.args[0].shape[0])

    class Reshaped(Product):
        def run(self, x, w, *, cfg):
            return x.reshape(-1, 8) @ w

    with pytest.raises(KernelError, match=r"no attribute 'shape'; if .* is an argument of the call, pass an array"):
        ByShape("by_shape")(given, X)
    with pytest.raises(AttributeError) as caught:
        Reshaped("reshaped")(given, X)
    assert any("is an argument of the call, pass an array" in note for note in caught.value.__notes__)


def test_a_run_without_return_is_an_error():
    class Forgotten(Product):
        def run(self, x, w, *, cfg):
            x @ w

    with pytest.raises(KernelError, match="forgotten: run returned no array and has no effect; add its `return`"):
        Forgotten("forgotten")(X, X)


def test_an_argument_by_its_name_on_an_invocation_says_where_arguments_are():
    class ByName(Product):
        def heuristic_cfg(self, inv):
            return Rows(inv.x.shape[0])

    with pytest.raises(KernelError, match=r"no attribute 'x'; the arguments of the call are inv.args and inv.kwargs"):
        ByName("by_name")(X, X)


def test_a_result_in_place_of_a_function_shows_the_call():
    with pytest.raises(ArgumentError, match=r"followed by its arguments, e.g. \(step, w, x\); got an array"):
        default_executor().explain(X @ X)


def test_a_configuration_of_a_plain_class_names_the_remedy(tmp_path):
    class Plain:
        def __init__(self):
            self.rows = 1

    with pytest.raises(SerializationError, match="make its class a frozen dataclass"):
        PersistentCache(tmp_path).put("device", "op", "call", Plain())


def test_a_misspelt_name_of_the_package_has_a_suggestion():
    with pytest.raises(AttributeError, match="no attribute 'autotun'; did you mean 'autotune'"):
        ops.autotun  # noqa: B018


@pytest.mark.parametrize(
    ("without", "says"),
    [("vmap", r"without must be a list of names, got 'vmap'; write without=\['vmap'\]"), (["vmpa"], "mean 'vmap'")],
)
def test_groups_of_checks_are_a_list_of_known_names(without, says):
    with pytest.raises(ArgumentError, match=says):
        check_kernel(Product("product"), X, X, without=without)


def test_a_missing_argument_of_an_operation_names_no_line_of_a_decorator():
    with pytest.raises(CallError, match=r"^rms_norm: missing a required argument: 'x'"):
        autotune(rms_norm)


def test_a_check_without_arguments_or_with_wrong_configurations_is_an_error():
    kernel = Product("product")
    with pytest.raises(CallError, match="product: missing a required argument: 'x'"):
        check_kernel(kernel)
    with pytest.raises(ConfigError, match=r"product: configs\[1\] must be a Rows, got 32; pass e.g. Rows\(rows=8\)"):
        check_kernel(kernel, X, X, configs=[Rows(4), 32])
    with pytest.raises(ConfigError, match="configs must be a list of configurations or a ConfigSpace, got"):
        check_kernel(kernel, X, X, configs={"rows": 32})


def test_an_unknown_limit_of_autotune_names_the_policy():
    with pytest.raises(TypeError, match=r"with policy_override\(budget_s=...\)"):
        autotune(lambda x: x, X, budget=3)


@pytest.mark.parametrize(("options", "wanted"), [({"rounds": 0}, "a positive int"), ({"warmup": -1}, "an int >= 0")])
def test_a_tuner_without_samples_is_refused(options, wanted):
    ((name, value),) = options.items()
    with pytest.raises(ArgumentError, match=f"{name} must be {wanted}, got {value}"):
        ops.Autotuner(**options)


class Call(OperationCall):
    pass


class Doubles(Implementation[Call]):
    name, differentiable, params = "doubles", True, Rows

    def forward(self, call, x, *, params):
        return x * 2, ()


def operation(members=(), **hooks):
    """Return an operation with these hooks, and one implementation with these members."""
    made = type("Own", (Doubles,), dict(members))

    class OwnConfig(OperationConfig):
        pass

    class Op(Operation[OwnConfig, Call, jax.Array]):
        implementations = Implementations({"doubles": made()})

        def prepare(self, x, *, implementation=None):
            return (x,), {"implementation": self.requested(implementation)}

        def describe(self, x):
            return Call()

    for name, hook in hooks.items():
        setattr(Op, name, hook)
    return Op("doubled")


class Fails(Doubles):
    def describe(self, x):
        return Call(rows=8)

    def heuristic(self, call):
        return Rows(row=8)


@pytest.mark.parametrize(
    ("members", "hooks", "text"),
    [
        (
            {"unsupported": lambda self, call: False},
            {},
            "^Own.unsupported must return a sentence, .* got False",
        ),
        ({"heuristic": lambda self, call: None}, {}, "^Own.heuristic must return an instance of Rows, got None"),
        ({"space": lambda self, call: Rows(8)}, {}, r"the result of Own.space must be a list .* got Rows\(rows=8\)"),
        ({"heuristic": Fails.heuristic}, {}, "^doubled: heuristic_cfg: Fails.heuristic raised .*; did you mean 'rows'"),
        ({}, {"describe": Fails.describe}, "^doubled: heuristic_cfg: Fails.describe raised TypeError"),
        ({}, {"prepare": lambda self, x: (x, {})}, r"^doubled: prepare must return \(args, kwargs\), got \(an array"),
    ],
)
def test_a_hook_that_returns_something_else_is_named(members, hooks, text):
    made = operation(members, **hooks)
    with pytest.raises((KernelError, ConfigError), match=text):
        autotune(made, X) if "space" in members else made(X)


def test_implementations_are_a_mapping_with_at_least_one():
    with pytest.raises(ArgumentError, match=r"^the argument of Implementations must be a mapping .*, got \[Doubles"):
        Implementations([Doubles()])

    class NoneConfig(OperationConfig):
        pass

    with pytest.raises(KernelError, match=r"^Nothing.implementations must have at least one implementation"):

        class Nothing(Operation[NoneConfig, Call, jax.Array]):
            implementations = Implementations({})
