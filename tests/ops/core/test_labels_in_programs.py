# SPDX-License-Identifier: Apache-2.0
"""Labels in lowered programs: found under every transformation, read back, without effect on the compiled program."""

from __future__ import annotations

import functools
import json
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tests.ops.sample_kernels import Plain, WithResiduals, WithRule, logged, squared, tanh_matmul

from ejkernel.ops import (
    LABEL_RE,
    ConfigCache,
    ConfigError,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    PersistentCache,
    extract_labels_from_hlo_text,
    find_labels_in_lowered,
    label,
    labels_to_configs,
)

x, w = np.ones((8, 16), np.float32), np.ones((16, 16), np.float32)
X = np.ones((4, 8, 16), np.float32)
ROWS = (0, None)


class InPallas(WithRule):
    def run(self, x, w, *, cfg):
        def body(x_ref, w_ref, out_ref):
            out_ref[...] = jnp.tanh(x_ref[...] @ w_ref[...])

        like = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
        return pl.pallas_call(body, out_shape=like, interpret=True)(x, w)


KERNELS = [Plain("plain"), WithRule("rule"), WithResiduals("residuals"), InPallas("pallas")]


def lowered(f, *arrays):
    return jax.jit(f).lower(*arrays)


def grads(f):
    return jax.grad(squared(f), (0, 1))


def repeated(f):
    return lambda x, w: jax.lax.scan(lambda c, _: (f(c, w), None), x, None, length=3)[0]


def looped(f):
    return lambda x, w: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, f(c[1], w)), (0, x))[1]


def branched(f):
    return lambda x, w: jax.lax.cond(x.sum() > 0, f, lambda x, w: x, x, w)


def sharded(f):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    # Pallas in interpret mode does not say over which axes its result varies
    return jax.shard_map(f, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"), check_vma=False)


def exported(f):
    return jax.export.export(jax.jit(f))(x, w).call


FORWARD = {
    "jit": lambda f: lowered(f, x, w),
    "jit(jit)": lambda f: lowered(jax.jit(f), x, w),
    "vmap": lambda f: lowered(jax.vmap(f, ROWS), X, w),
    "scan": lambda f: lowered(repeated(f), x, w),
    "while": lambda f: lowered(looped(f), x, w),
    "cond": lambda f: lowered(branched(f), x, w),
    "shard_map": lambda f: lowered(sharded(f), x, w),
    "export": lambda f: lowered(exported(f), x, w),
}
BOTH = {
    "grad": lambda f: lowered(grads(f), x, w),
    "vmap(grad)": lambda f: lowered(jax.vmap(grads(f), ROWS), X, w),
    "grad(checkpoint)": lambda f: lowered(jax.grad(jax.checkpoint(squared(f)), (0, 1)), x, w),
    "grad(scan)": lambda f: lowered(grads(repeated(f)), x, w),
    "grad(shard_map)": lambda f: lowered(grads(sharded(f)), x, w),
    "export of grad": lambda f: lowered(exported(grads(f)), x, w),
}


def operations(program):
    return [LABEL_RE.fullmatch(text)["op"] for text in find_labels_in_lowered(program)]


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("program", FORWARD)
def test_a_call_is_labelled_in_lowered_text(program, kernel):
    f, chooser = logged(kernel)
    found = find_labels_in_lowered(FORWARD[program](f))
    (inv,) = chooser.asked
    assert [label(kernel.op_id_v, inv.call_key)] == found


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("program", BOTH)
def test_both_directions_are_labelled_in_the_text_of_a_gradient(program, kernel):
    f, chooser = logged(kernel)
    found = find_labels_in_lowered(BOTH[program](f))
    assert {label(inv.op_id_v, inv.call_key) for inv in chooser.asked} == set(found)
    assert {kernel.op_id_v, f"{kernel.op_id}.bwd@v0"} == {LABEL_RE.fullmatch(text)["op"] for text in found}


def test_a_label_survives_serialisation_of_an_exported_program():
    pytest.importorskip("flatbuffers", reason="jax.export serialises with it")
    f, _ = logged(KERNELS[0])
    blob = jax.export.export(jax.jit(f))(x, w).serialize()
    assert operations(lowered(jax.export.deserialize(blob).call, x, w)) == ["plain@v0"]


def test_labels_are_distinct_and_in_order_of_first_appearance():
    executor = Executor(ConfigSelectorChain())
    first, second = (functools.partial(executor, Plain(name)) for name in ("first", "second"))

    def model(x, w):
        y = second(first(x, w), w)
        return first(y, w) + second(y, w[:, :16])

    assert operations(lowered(model, x, w)) == ["first@v0", "second@v0"]


def test_calls_of_different_shapes_have_separate_labels():
    f, _ = logged(KERNELS[0])
    program = lowered(lambda x, w: (f(x, w), f(x[:4], w), jax.vmap(f)(x[None], w[None])), x, w)
    assert operations(program) == ["plain@v0"] * 3


class Outer(Kernel[int, jax.Array]):
    def __init__(self, inner):
        super().__init__("outer")
        self.inner = inner

    def run(self, x, w, *, cfg):
        return self.inner(x, w)

    def heuristic_cfg(self, inv):
        return 0


@pytest.mark.parametrize("transform", [lambda f: f, grads], ids=["forward", "gradient"])
def test_a_value_that_two_nested_kernels_return_keeps_both_labels(transform):
    inner, _ = logged(Plain("inner"))
    outer, _ = logged(Outer(inner))
    assert {"outer@v0", "inner@v0"} <= set(operations(lowered(transform(outer), x, w)))


@pytest.mark.parametrize("depth", [1, 2])
def test_the_name_of_a_kernel_is_a_scope_for_profiles(depth):
    f, _ = logged(Plain("profiled"))
    g = functools.reduce(lambda g, _: jax.jit(g), range(depth), f)
    assert "profiled/" in lowered(g, x, w).as_text(debug_info=True)


class Passes(Kernel[int, tuple]):
    """Returns some of its arguments as they are."""

    def __init__(self, *results):
        super().__init__("passes")
        self.results = results

    def run(self, x, w, *, cfg):
        made = {"x": x, "w": w, "sum": x + 1, "rows": jnp.arange(x.shape[0]), "key": jax.random.key(0)}
        return tuple(made[name] for name in self.results)

    def heuristic_cfg(self, inv):
        return 0


@pytest.mark.parametrize("results", [("sum",), ("x", "sum"), ("x", "w", "rows"), ("rows", "x"), ("key",)], ids=" ".join)
def test_any_result_that_the_call_made_carries_the_label(results):
    f, _ = logged(Passes(*results))
    assert operations(lowered(f, x, w)) == ["passes@v0"]


@pytest.mark.parametrize("results", [("x",), ("w", "x")], ids=" ".join)
def test_explain_says_that_a_call_which_only_passes_inputs_on_has_no_label(results):
    kernel, executor = Passes(*results), Executor(ConfigSelectorChain())
    assert operations(lowered(functools.partial(executor, kernel), x, w)) == []
    explained = executor.explain(kernel, x, w)
    assert explained.label is None
    assert "each result of the call is one of its inputs" in explained.label_note
    assert explained.label_note in str(explained)


def test_explain_says_which_label_a_call_has():
    kernel, executor = Plain("told"), Executor(ConfigSelectorChain(), stamp_prefix="ours")
    explained = executor.explain(kernel, x, w)
    assert [explained.label] == find_labels_in_lowered(lowered(functools.partial(executor, kernel), x, w))


# --- content of a label ---


def payloads(program):
    """Return the value of each label in StableHLO text, where a quote is written \\22 and a backslash twice."""
    found = re.findall(r'"?(ejkernel_ops#[^"\s=]+)"? = "((?:[^"\\]|\\.)*)"', program.as_text())
    unescape = functools.partial(re.sub, r"\\([0-9A-F]{2})", lambda match: chr(int(match[1], 16)))
    return {name: unescape(text.replace("\\\\", "\\5C")) for name, text in found}


class WithOptions(Plain):
    def run(self, x, w, *, cfg, note="", activation=jnp.tanh):
        return activation(x @ w)


def with_options():
    f, chooser = logged(WithOptions())
    return functools.partial(f, note='say "hi", \\ or \\22 or é {x}', activation=jax.nn.gelu), chooser


def test_the_payload_is_the_key_by_default():
    f, chooser = with_options()
    found = payloads(lowered(f, x, w))
    (inv,) = chooser.asked
    assert {label(inv.op_id_v, inv.call_key): inv.call_key} == found


@pytest.mark.parametrize("transform", [lambda f: f, grads], ids=["call", "gradient"])
def test_json_payloads_are_the_whole_abstract_calls(transform, monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", "json")
    f, chooser = with_options()
    found = payloads(lowered(transform(f), x, w))
    expected = {label(inv.op_id_v, inv.call_key): inv.description for inv in chooser.asked}
    assert expected == {name: json.loads(text) for name, text in found.items()}


def test_json_and_hash_have_the_same_label(monkeypatch):
    f, _ = with_options()
    by_hash = find_labels_in_lowered(lowered(f, x, w))
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", "json")
    f, _ = with_options()
    assert by_hash == find_labels_in_lowered(lowered(f, x, w))


def test_without_stamping_programs_have_no_labels(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", "none")
    f, _ = with_options()
    assert find_labels_in_lowered(lowered(f, x, w)) == []


def test_an_unknown_way_of_stamping_is_an_error(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", "full")
    f, _ = with_options()
    with pytest.raises(ConfigError, match=r"EJKERNEL_OPS_STAMP must be one of hash, json, none; got 'full'"):
        lowered(f, x, w)


def test_the_prefix_is_the_executors():
    f = functools.partial(Executor(ConfigSelectorChain(), stamp_prefix="team.a-b"), KERNELS[0])
    (found,) = find_labels_in_lowered(lowered(f, x, w))
    assert LABEL_RE.fullmatch(found)["prefix"] == "team.a-b"


def test_a_call_without_a_key_runs_without_a_label():
    f, _ = logged(WithOptions())
    assert find_labels_in_lowered(lowered(functools.partial(f, activation=lambda x: x), x, w)) == []


# --- cost of stamping ---


def optimised(f, *arrays):
    text = jax.jit(f).lower(*arrays).compile().as_text()
    text = re.sub(r", (metadata|frontend_attributes)=\{(?:[^{}\"]|\"[^\"]*\"|\{[^{}]*\})*\}", "", text)
    program, _, _ = text.partition("\nFileNames")  # tables of source lines, in newer versions
    return program


def two_layers(f, x, w):
    return f(f(x, w) * 2, w) + jnp.tanh(x @ w)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS[:3], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("transform", [lambda f: f, grads], ids=["forward", "gradient"])
def test_stamping_does_not_change_the_optimised_program(kernel, transform, monkeypatch):
    programs = {}
    for mode in ("none", "hash", "json"):
        monkeypatch.setenv("EJKERNEL_OPS_STAMP", mode)
        f, _ = logged(kernel)

        def model(x, w, f=f):
            return two_layers(f, x, w)

        programs[mode] = optimised(transform(model), x, w)
    assert "ejkernel_ops#" not in programs["hash"]
    assert programs["none"] == programs["hash"]
    assert programs["none"] == programs["json"]


def test_a_forward_compiles_to_the_plain_function_s_program():
    f, _ = logged(KERNELS[0])

    def model(x, w, f):
        return two_layers(f, x, w)

    kernel, plain = (optimised(functools.partial(model, f=function), x, w) for function in (f, tanh_matmul))
    assert re.findall(r" (\w+)\(", plain) == re.findall(r" (\w+)\(", kernel)


# Labels as text


def test_a_label_is_formatted_from_its_parts():
    assert label("matmul@v1", "0123456789abcdef") == "ejkernel_ops#matmul@v1:0123456789abcdef"
    assert label("matmul@v1", "0123456789abcdef", prefix="ours") == "ours#matmul@v1:0123456789abcdef"


def test_a_label_is_not_validated():
    assert label("any thing", "xyz") == "ejkernel_ops#any thing:xyz"


def test_the_decorator_labels_a_function():
    @label("block")
    def block(x, w):
        return {"y": jnp.tanh(x @ w)}

    program = lowered(lambda x, w: block(x, w)["y"], x, w)
    assert operations(program) == ["block@v0"]
    assert "block/" in program.as_text(debug_info=True)


def test_the_decorator_labels_a_method_and_a_call_with_a_function():
    class Model:
        @label("block")
        def __call__(self, activation, x):
            return activation(x)

    assert operations(lowered(lambda x: Model()(lambda x: 2 * x, x), x)) == ["block@v0"]


def test_the_decorator_labels_a_call_with_texts():
    @label("block")
    def block(words, x):
        return len(words) * x

    assert operations(lowered(lambda x: block(np.array(["a", "b"]), x), x)) == ["block@v0"]


def test_the_decorator_keeps_results_gradients_and_the_function_itself():
    @label("block")
    def block(x, w):
        """Multiply."""
        return jnp.tanh(x @ w)

    expected, actual = (grads(f)(x, w) for f in (tanh_matmul, block))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), actual, expected)
    assert (block.__name__, block.__doc__) == ("block", "Multiply.")


@pytest.mark.parametrize("name", ["", "two words", "a#b", "1st", "a:b"])
def test_the_decorator_refuses_names_that_cannot_be_found_again(name):
    with pytest.raises(ConfigError, match="label name must be ASCII letters, digits"):
        label(name)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("ejkernel_ops#matmul@v1:0123456789abcdef", ("ejkernel_ops", "matmul@v1", "1", "0123456789abcdef")),
        ("a.b-c#flash-attention.bwd@v2.1:ffffffffffffffff", ("a.b-c", "flash-attention.bwd@v2.1", "2.1", "f" * 16)),
    ],
)
def test_a_label_has_prefix_operation_version_and_key(text, parts):
    match = LABEL_RE.fullmatch(text)
    assert parts == match.group("prefix", "op", "version", "key")


@pytest.mark.parametrize(
    "text",
    [
        "matmul@v1:0123456789abcdef",
        "p#matmul:0123456789abcdef",
        "p#matmul@v1:0123456789abcde",
        "p#matmul@v1:0123456789abcdef0",
        "p#matmul@v1:0123456789ABCDEF",
        "p#mat mul@v1:0123456789abcdef",
    ],
)
def test_other_text_is_not_a_label(text):
    assert extract_labels_from_hlo_text(text) == []


def test_labels_are_found_in_any_text():
    one, two = label("a@v1", "0" * 16), label("b.bwd@v2", "1" * 16)
    assert [two, one] == extract_labels_from_hlo_text(f'x {{"{two}" = "{one}"}}, frontend_attributes={{{two}="y"}}')


def test_a_lowered_program_has_its_labels_as_hlo_too():
    f, _ = logged(KERNELS[1])
    program = lowered(grads(f), x, w)
    assert set(find_labels_in_lowered(program)) == set(extract_labels_from_hlo_text(program.as_text("hlo")))


# From labels to configurations


@pytest.fixture
def labelled(tmp_path):
    """A chain, a lowered program with two labels, and the keys of both."""
    chain = ConfigSelectorChain(ConfigCache(), PersistentCache(tmp_path / "configs", shipped=False))
    executor = Executor(chain)
    kernels = [Plain("first"), Plain("second")]
    program = lowered(lambda x, w: executor(kernels[1], executor(kernels[0], x, w), w), x, w)
    return chain, program, [Invocation(kernel=kernel, args=(x, w)).key for kernel in kernels]


@pytest.mark.parametrize("as_labels", [find_labels_in_lowered, lambda program: program], ids=["labels", "program"])
def test_configurations_of_labels_come_from_memory_then_disk(labelled, as_labels):
    chain, program, keys = labelled
    chain.cache.clear()
    chain.cache.put(keys[0], 3)
    chain.persistent.put(keys[0], 4)
    chain.persistent.put(keys[1], 5)
    expected = [(label(keys[0].op, keys[0].call), 3), (label(keys[1].op, keys[1].call), 5)]
    assert expected == labels_to_configs(as_labels(program), chain)


def test_a_label_without_a_remembered_configuration_has_none(labelled):
    chain, program, _ = labelled
    chain.cache.clear()
    assert [config for _, config in labels_to_configs(program, chain)] == [None, None]


def test_without_a_chain_the_default_executors_is_asked():
    program = lowered(Plain("default"), x, w)
    assert [config for _, config in labels_to_configs(program)] == [0]


def test_something_else_than_a_label_is_an_error(labelled):
    with pytest.raises(ConfigError, match=r"labels must look like .* got 'matmul'"):
        labels_to_configs(["matmul"], labelled[0])
