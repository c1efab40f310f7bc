# SPDX-License-Identifier: Apache-2.0
"""Calls, configurations and tables as people read them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import Invocation
from ejkernel.ops.utils.tables import arguments, compact, duration, text_table


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_a_call_s_equal_arrays_are_counted_and_its_options_named():
    args = (array(2, 8), array(2, 8), array(8, dtype=jnp.int32), [array(3, dtype=jnp.float32)])
    inv = Invocation(op_id="any", args=args, kwargs={"causal": True, "window": None, "scale": 0.5})
    assert arguments(inv.description) == "bf16[2,8] x2, i32[8], f32[3], causal=True"


def test_batch_sizes_are_shown_outermost_first():
    inv = Invocation(op_id="any", args=(array(4),), batch_axes=((0,), (1,)), batch_sizes=(2, 3))
    assert arguments(inv.description) == "bf16[4], vmap[2, 3]"


@pytest.mark.parametrize("call", [None, "text", {}, {"args": 3, "kwargs": [1], "steps": 1}, {"args": [{"array": 1}]}])
def test_nothing_is_said_of_what_is_no_call(call):
    assert arguments(call) == ""


def test_a_configuration_shows_what_is_set():
    @dataclasses.dataclass
    class Inner:
        rows: int = 3
        name: str | None = None

    @dataclasses.dataclass
    class Outer:
        inner: Inner
        warps: int | None = None

    assert compact(Outer(Inner())) == "inner(rows=3)"
    assert compact(7) == "7"


def test_however_much_there_is_a_line_has_its_end():
    many = {f"name{n}": n for n in range(10_000)}
    for text in (compact(many), arguments({"kwargs": many}), arguments({"args": [{"array": ["f", [*many.values()]]}]})):
        assert len(text) == 1000
        assert text.endswith("...")


@pytest.mark.parametrize(("seconds", "text"), [(1.26e-6, "1.3 us"), (9.9e-3, "9900.0 us"), (0.5, "500.0 ms")])
def test_a_time_has_a_unit(seconds, text):
    assert duration(seconds) == text


def test_columns_are_as_wide_as_their_widest_cell():
    assert text_table(("a", "long"), [("wide", "b"), ("", "")]) == "a     long\nwide  b\n"
