# SPDX-License-Identifier: Apache-2.0
"""The executor: dispatch to platform methods, arguments of every kind, methods, and the default one."""

from __future__ import annotations

import copy
import pickle
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from tests.ops.sample_kernels import Times

from ejkernel import ops
from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor, Kernel, PersistentCache, Resolution
from ejkernel.ops.errors import (
    ArgumentError,
    CacheWarning,
    CallError,
    ConfigError,
    KernelError,
    NoConfigError,
)
from ejkernel.ops.registry import recording

X = np.arange(8, dtype=np.float32)


# --- direct calls of kernels ---


def test_a_kernel_runs_through_the_default_executor():
    chain = ConfigSelectorChain()
    ops.set_default_executor(Executor(chain))
    np.testing.assert_array_equal(Times()(X), X)
    assert len(chain.cache) == 1


def test_a_configuration_can_be_insisted_on():
    assert Times()(X, cfg=3)[1] == 3


def test_the_default_executor_is_made_once():
    assert ops.default_executor() is ops.default_executor()


def test_the_default_executor_is_made_once_by_many_threads():
    start, seen = threading.Barrier(8, timeout=30), []

    def work():
        start.wait()
        seen.append(ops.default_executor())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(executor) for executor in seen}) == 1


@pytest.mark.parametrize(("raw", "autotune"), [("1", True), ("0", False), ("", False)])
def test_the_environment_decides_whether_the_default_executor_tunes(monkeypatch, raw, autotune):
    monkeypatch.setenv("EJKERNEL_AUTOTUNE", raw)
    assert ops.default_executor().chooser.policy.autotune is autotune


def test_the_default_executor_can_be_replaced_and_recreated():
    mine = Executor(ConfigSelectorChain())
    ops.set_default_executor(mine)
    replaced = ops.default_executor()
    ops.set_default_executor(None)
    assert (replaced is mine, ops.default_executor() is mine) == (True, False)


def test_an_executor_runs_only_kernels(executor):
    with pytest.raises(KernelError, match=r"kernel must be an instance of Kernel, got 3"):
        executor(3, X)
    with pytest.raises(CallError, match=r"Times is a kernel class: create the kernel first, times = Times\('times'\)"):
        executor(Times, X)


# --- arguments ---


class Everything(Kernel[int, Any]):
    """Returns its arguments in a tree."""

    def run(self, tree, scale=1, *, cfg, activation=None):
        out = jax.tree.map(lambda leaf: leaf * scale, tree)
        return out if activation is None else jax.tree.map(activation, out)

    def heuristic_cfg(self, inv):
        return 1


@pytest.mark.parametrize(
    "tree",
    [{"b": X, "a": [X, (X,)]}, [X, None], (X, {"c": X}), {"only": None, "x": X}],
    ids=["dict", "list", "tuple", "none"],
)
def test_containers_of_arrays_go_in_and_come_out(executor, tree):
    got = executor(Everything(), tree, 2)
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    np.testing.assert_array_equal(jax.tree.leaves(got), [2 * leaf for leaf in jax.tree.leaves(tree)])


def test_containers_of_one_shape_may_differ_in_static_fields(executor):
    kernel = Everything()
    got = [executor(kernel, {"x": X, "n": count})["n"] for count in (1, 2, 1.5)]
    assert [float(value) for value in got] == [1.0, 2.0, 1.5]


@pytest.mark.parametrize("activation", [jnp.tanh, jax.nn.relu, None])
def test_static_keywords_reach_run(executor, activation):
    expected = X if activation is None else activation(X)
    np.testing.assert_allclose(executor(Everything(), X, activation=activation), expected)


def test_a_static_argument_may_change_between_calls(executor):
    kernel = Everything()
    assert [float(executor(kernel, X, scale)[1]) for scale in (1, 2.5, True, 3)] == [1.0, 2.5, 1.0, 3.0]


class Sign(Kernel[int, jax.Array]):
    """The sign of a static float, which tells `0.0` from `-0.0`, and counts its traces."""

    def __init__(self):
        super().__init__()
        self.traces = 0

    def run(self, x, *, option, cfg):
        self.traces += 1
        return x + cfg * np.copysign(1, option)

    def heuristic_cfg(self, inv):
        return 1


@pytest.mark.parametrize("cfg", [None, 1])
def test_signed_zeros_are_distinguished_in_any_order(executor, cfg):
    kernel = Sign()
    options = (2.0, 0.0, -0.0, -2.0, 0.0)
    assert [float(executor(kernel, X[0], option=option, cfg=cfg)) for option in options] == [1, 1, -1, -1, 1]


@pytest.mark.parametrize("cfg", [None, 1])
def test_a_repeated_call_is_not_traced_again(executor, cfg):
    kernel = Sign()
    for option in (2.0, 0.0, -0.0) * 2:
        executor(kernel, X, option=option, cfg=cfg)
    before = kernel.traces
    for option in (2.0, 0.0, -0.0):
        executor(kernel, X, option=option, cfg=cfg)
    assert kernel.traces == before


@pytest.mark.parametrize("option", [0.0, 3.0])
def test_constants_in_a_trace_are_taken_after_a_signed_zero(executor, option):
    kernel = Sign()
    executor(kernel, X, option=-0.0)
    found = jax.jit(lambda n: n * executor(kernel, X, option=option))(2.0)
    np.testing.assert_array_equal(found, 2 * (X + 1))


@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array([None] * 8), "scale is a NumPy array of dtype object, .* np.asarray"),
        (np.array(["text"] * 8), "scale is a NumPy array of dtype <U4, .* np.asarray"),
        (np.ma.masked_array(np.ones(8, np.float32), mask=True), "scale is a masked array .* filled"),
    ],
    ids=["objects", "text", "masked"],
)
def test_arrays_that_jax_does_not_support_are_named(executor, value, message, calls):
    kernel = Everything()
    for _ in range(calls):
        executor(kernel, X, np.ones(8, np.float32))
    with pytest.raises(ArgumentError, match=message):
        executor(kernel, X, value)


def test_arrays_on_different_devices_are_named(executor, mesh):
    first, second = (jax.device_put(X, device) for device in mesh.devices.ravel()[:2])
    with pytest.raises(ArgumentError, match="the same devices, got tree on cpu:0 and scale on cpu:1; use"):
        executor(Everything(), first, second)


def test_a_positional_parameter_may_be_given_by_keyword(executor):
    assert executor(Everything(), X, scale=3)[1] == 3


@pytest.mark.parametrize(
    "value", [np.float32(2), np.ones(8, np.float32) * 2, jnp.asarray(2.0)], ids=["scalar", "numpy", "jax"]
)
def test_arrays_of_every_make_are_arrays(executor, value):
    with recording() as seen:
        executor(Everything(), X, value)
    assert isinstance(seen[0].args[1], jax.ShapeDtypeStruct)


def test_arguments_that_do_not_fit_run_are_a_type_error_that_names_the_operation(executor):
    with pytest.raises(TypeError, match="Everything has no argument `colour`; its arguments are"):
        executor(Everything(), X, colour="red")


def test_run_must_take_cfg(executor):
    class Deaf(Times):
        def run(self, x):
            return x

    with pytest.raises(KernelError, match=r"Deaf.run must take cfg as a keyword argument: def run"):
        executor(Deaf(), X)


def test_run_may_take_cfg_among_its_keywords(executor):
    class Loose(Times):
        def run(self, x, **keywords):
            return keywords["cfg"] * x

    assert executor(Loose(), X)[1] == 1


def test_arguments_are_prepared_once_a_call(executor):
    prepared = []

    class Prepared(Times):
        def prepare(self, x, *, double=False):
            prepared.append(double)
            return (x.reshape(2, 4) * (2 if double else 1),), {}

    with recording() as seen:
        got = jax.jit(lambda x: executor(Prepared(), x, double=True))(X)
    assert (prepared, got.shape, seen[0].args[0].shape) == ([True], (2, 4), (2, 4))
    np.testing.assert_array_equal(got, 2 * X.reshape(2, 4))


def test_run_on_an_instance_is_used(executor):
    kernel = Times()
    kernel.run = lambda x, *, cfg: x + 100
    assert executor(kernel, X)[0] == 100


def test_a_configuration_may_be_a_dictionary(executor):
    class Dictionary(Kernel[dict, jax.Array]):
        def run(self, x, *, cfg):
            return cfg["scale"] * x

        def heuristic_cfg(self, inv):
            return {"scale": 2}

    kernel = Dictionary()
    assert [executor(kernel, X)[1], executor(kernel, X, cfg={"scale": 5})[1]] == [2, 5]


@pytest.mark.parametrize(("left", "right"), [(1, 1.0), (1, True)])
def test_configurations_that_python_finds_equal_are_different(executor, left, right):
    kernel, seen = Times(), []
    kernel.run = lambda x, *, cfg: seen.append(cfg) or x
    for config in (left, right):
        executor(kernel, X, cfg=config)
    assert [type(config) for config in seen[-1:]] == [type(right)]


def test_a_configuration_must_be_hashable_or_data(executor):
    class Neither:
        __hash__ = None

    with pytest.raises(ConfigError, match=r"cfg must be hashable or plain data, got <.*Neither"):
        executor(Times(), X, cfg=Neither())


def test_a_hashable_configuration_need_not_be_data(executor):
    class Opaque:
        pass

    kernel = Times()
    kernel.run = lambda x, *, cfg: x + isinstance(cfg, Opaque)
    assert executor(kernel, X, cfg=Opaque())[0] == 1


def test_results_must_not_depend_on_the_configuration(executor, chain):
    class Shapely(Times):
        def run(self, x, *, cfg):
            return x[:cfg]

    kernel = Shapely()
    chain.cache.put(ops.Invocation(kernel=kernel, args=(X,)).key, 5)
    text = r"results must have the same .*; 5 \(from memory\) gives float32\[5\], the heuristic gives float32\[1\]"
    with pytest.raises(KernelError, match=text):
        jax.jit(lambda x: executor(kernel, x))(X)


# --- choosing and compiling ---


def test_choosing_runs_nothing(executor):
    kernel = Times()
    kernel.run = None
    assert executor.choose_config(kernel, jax.ShapeDtypeStruct((4,), "float32")) == 1


def test_resolving_an_invocation_needs_its_kernel(executor):
    with pytest.raises(ArgumentError, match="Invocation of 'matmul' has no kernel; pass kernel="):
        executor.resolve(ops.Invocation(op_id="matmul", args=(X,)))


def test_resolving_says_the_source(executor):
    inv = ops.Invocation(kernel=Times(), args=(X,))
    assert executor.resolve(inv) == Resolution(1, "heuristic", inv.key)


def test_a_compiled_function_keeps_the_configuration_of_its_examples(executor, chain):
    kernel = Times()
    chain.cache.put(ops.Invocation(kernel=kernel, args=(X,)).key, 5)
    compiled = executor.compile(kernel, X)
    assert compiled(X[:3])[1] == 5


def test_a_compiled_function_has_the_static_keywords_of_its_examples(executor):
    compiled = executor.compile(Everything(), X, activation=jnp.square)
    assert compiled(X)[3] == 9


def test_a_compiled_function_takes_other_static_keywords(executor):
    compiled = executor.compile(Everything(), X, activation=jnp.square)
    assert compiled(X, activation=jnp.negative)[3] == -3


def test_a_compiled_function_takes_static_positional_arguments(executor):
    compiled = executor.compile(Everything(), X, 2)
    assert [compiled(X, 2)[1], compiled(X, 3)[1]] == [2, 3]


def test_a_configuration_can_be_compiled_in(executor):
    assert executor.compile(Times(), X, cfg=9)(X)[1] == 9


def test_a_chooser_of_ones_own_runs_calls():
    class Always:
        def choose(self, inv, kernel):
            return 3

    executor, kernel = Executor(Always()), Times()
    assert [executor(kernel, X)[1], jax.jit(lambda x: executor(kernel, x))(X)[1]] == [3, 3]


def test_a_stamp_prefix_begins_the_labels(chain):
    executor = Executor(chain, stamp_prefix="mine")
    kernel = Times()
    (label,) = ops.find_labels_in_lowered(jax.jit(lambda x: executor(kernel, x)).lower(X))
    assert label.startswith("mine#Times@v0:")


class Resize(Kernel):
    """`x` times the length of `method`; its parameters have names that the executor uses, too."""

    def run(self, x, kernel, *, cfg, method="nearest"):
        return x * kernel * len(method)

    def heuristic_cfg(self, inv):
        return 1


def test_a_kernel_may_have_parameters_named_kernel_and_method(executor):
    resize, given = Resize("resize"), {"kernel": X, "method": "bilinear"}
    for out in (executor(resize, X, **given), executor.compile(resize, X, **given)(X, **given)):
        np.testing.assert_array_equal(out, 8 * X * X)
    assert executor.choose_config(resize, X, **given) == 1


# --- method="shard_map" ---


@pytest.fixture
def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


SPEC = PartitionSpec("data")


@pytest.fixture
def sharded(mesh):
    return {"method": "shard_map", "mesh": mesh, "in_specs": (SPEC,), "out_specs": SPEC}


def test_each_device_runs_its_shard(executor, sharded):
    got = executor(Times(), X, **sharded)
    np.testing.assert_array_equal(got, X)
    assert len(got.sharding.device_set) == 8


def test_the_call_is_the_local_one_and_says_how_it_was_made(executor, sharded):
    with recording() as seen:
        executor(Times(), X, **sharded)
    assert [(inv.args[0].shape, inv.method) for inv in seen] == [((1,), "shard_map")]


def test_a_sharded_call_is_configured_apart(executor, chain, sharded):
    kernel = Times()
    chain.cache.put(ops.Invocation(kernel=kernel, args=(X[:1],), method="shard_map").key, 5)
    np.testing.assert_array_equal(executor(kernel, X, **sharded), 5 * X)


def test_a_sharded_call_is_differentiated(executor, sharded):
    kernel = Times()
    gradient = jax.grad(lambda x: executor(kernel, x, **sharded).sum())(X)
    np.testing.assert_array_equal(gradient, np.ones(8, np.float32))


def test_a_sharded_call_takes_static_arguments_and_a_configuration(executor, mesh):
    options = {"method": "shard_map", "mesh": mesh, "in_specs": (SPEC,), "out_specs": SPEC}
    got = executor(Everything(), X, 3, activation=jnp.negative, cfg=1, **options)
    np.testing.assert_array_equal(got, -3 * X)


def test_a_sharded_call_takes_nothing_by_keyword(executor, sharded):
    np.testing.assert_array_equal(executor(Everything(), X, activation=None, cfg=1, **sharded), X)


def test_no_method_is_a_plain_call(executor):
    np.testing.assert_array_equal(executor(Times(), X, method=None), X)


def test_an_unknown_method_is_an_error(executor):
    with pytest.raises(ArgumentError, match="method must be one of shard_map, or None; got 'pmap'"):
        executor(Times(), X, method="pmap")


def test_a_sharded_call_without_a_mesh_is_an_error(executor):
    with pytest.raises(ArgumentError, match=r"needs mesh=, in_specs= and out_specs=; missing \['mesh', 'out_specs'\]"):
        executor(Times(), X, method="shard_map", in_specs=(SPEC,))


def test_a_sharded_call_takes_arrays_by_position(executor, sharded):
    with pytest.raises(ArgumentError, match="takes arrays by position, got tree by keyword"):
        executor(Everything(), tree=X, **sharded)


# --- saved configurations that no longer run ---


class Rows(Kernel[int, jax.Array]):
    """Sums in `cfg` rows, which must divide the length."""

    def run(self, x, *, cfg):
        return x.reshape(cfg, -1).sum(0).sum()

    def heuristic_cfg(self, inv):
        return 1


def test_a_saved_configuration_that_does_not_run_is_a_warning_and_the_heuristic_is_used(tmp_path):
    saved = PersistentCache(tmp_path / "cache", shipped=False)
    kernel = Rows("rows")
    inv = ops.Invocation(kernel=kernel, args=(X,))
    saved.put(inv.key, 3)
    executor = Executor(ConfigSelectorChain(ConfigCache(), saved))
    with pytest.warns(
        CacheWarning, match=r"rows: ignoring the saved configuration 3 \(call \w+\), .*reshape.*`ejkernel tune`"
    ):
        assert float(executor(kernel, X)) == X.sum()
    assert float(jax.jit(lambda x: executor(kernel, x))(X)) == X.sum()  # and only one warning


def test_a_saved_configuration_that_does_not_run_is_explained(tmp_path):
    saved = PersistentCache(tmp_path / "cache", shipped=False)
    kernel = Rows("rows")
    saved.put(ops.Invocation(kernel=kernel, args=(X,)).key, 3)
    why = Executor(ConfigSelectorChain(ConfigCache(), saved)).explain(kernel, X)
    assert (why.source, why.config) == ("heuristic", 1)
    assert "persistent the saved configuration 3 does not run: TypeError: cannot reshape" in " ".join(str(why).split())


@pytest.mark.parametrize("policy", [{"heuristic": False}, {"note_misses": True}, {"autotune": True}])
def test_a_saved_configuration_that_does_not_run_is_a_miss(tmp_path, policy):
    saved = PersistentCache(tmp_path / "cache", shipped=False)
    kernel = Rows("rows")
    inv = ops.Invocation(kernel=kernel, args=(X,))
    saved.put(inv.key, 3)

    chain = ConfigSelectorChain(ConfigCache(), saved, policy=AutotunePolicy(**policy))
    chain.search = lambda inv, kernel, **_: chain.remember(inv.key, 4) or types.SimpleNamespace(config=4)
    if not policy.get("heuristic", True):
        with pytest.raises(NoConfigError, match="The saved entry is not used: the saved configuration 3 does not run"):
            Executor(chain)(kernel, X)
        return
    with pytest.warns(CacheWarning, match="ignoring the saved configuration 3"):
        assert float(Executor(chain)(kernel, X)) == X.sum()
    if policy.get("autotune"):
        assert (saved.get(inv.key), chain.resolve(inv, kernel).source) == (4, "autotune")
    else:
        assert inv.key.op in ops.missed()[inv.key.device]
        assert len(list((saved.path / "missed").rglob("*.json"))) == 1


def test_a_given_configuration_that_does_not_run_is_an_error(executor):
    with pytest.raises(ConfigError, match=r"rows: cfg=3 is not in the space of this call; .*TypeError: cannot reshape"):
        executor(Rows("rows"), X, cfg=3)


# --- copies ---


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copied_executor_has_the_answers_and_listens_to_its_own_chooser(copied):
    kernel, cache = Rows("rows"), ConfigCache()
    executor = Executor(ConfigSelectorChain(cache), stamp_prefix="other")
    key = ops.Invocation(kernel=kernel, args=(X,)).key
    cache.put(key, 2)
    other = copied(executor)
    assert (other.choose_config(kernel, X), other.stamp_prefix) == (2, "other")
    assert float(other(kernel, X)) == float(executor(kernel, X)) == X.sum()
    is_shared = copied is copy.copy
    other.chooser.cache.put(key, 4)
    assert executor.choose_config(kernel, X) == (4 if is_shared else 2)
    assert other.choose_config(kernel, X) == 4


def test_a_copied_cache_is_independent():
    cache = ConfigCache()
    cache.put("a", 1)
    other = copy.copy(cache)
    other.put("a", 2)
    assert (cache.get("a"), other.get("a")) == (1, 2)


@pytest.mark.parametrize("cfg", [None, 1])
def test_a_kernel_made_in_a_trace_may_be_called_with_constants(cfg):
    def program(n):
        return n * Times("made_in_a_trace")(X, cfg=cfg)

    np.testing.assert_array_equal(jax.jit(program)(3.0), 3 * Times()(X, cfg=1))
