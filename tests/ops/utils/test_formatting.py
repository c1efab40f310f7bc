# SPDX-License-Identifier: Apache-2.0
"""Calls, configurations and tables as people read them."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ejkernel.kernels.linear_cross_entropy.operation import linear_cross_entropy_gradients
from ejkernel.modules import paged_attention, paged_plan
from ejkernel.ops import Invocation, stable_json
from ejkernel.ops.registry import recording
from ejkernel.ops.utils.formatting import (
    arguments,
    compact,
    counted,
    duration,
    durations,
    rounded,
    stored_time,
    text_table,
)


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_a_call_s_equal_arrays_are_counted_and_its_options_named():
    args = (array(2, 8), array(2, 8), array(8, dtype=jnp.int32), [array(3, dtype=jnp.float32)])
    inv = Invocation(op_id="any", args=args, kwargs={"causal": True, "window": None, "scale": 0.5, "size": (64, 0)})
    text = "bf16[2,8] x2, i32[8], f32[3], causal=True, scale=0.5, size=(64, 0)"
    assert arguments(inv.description) == text
    usual = Invocation(op_id="any", args=args[:1], kwargs={"softmax_scale": 0.125, "temperature": 0.7})
    assert arguments(usual.description) == "bf16[2,8], temperature=0.7"


@pytest.mark.slow
def test_arrays_that_an_operation_adds_to_the_user_s_are_not_shown():
    x, w, labels = jnp.ones((4, 8)), jnp.ones((8, 16)), jnp.zeros(4, jnp.int32)
    args, kwargs = linear_cross_entropy_gradients.prepare(x, w, labels, jnp.ones(4))
    inv = Invocation(kernel=linear_cross_entropy_gradients, args=args, kwargs=kwargs)
    assert arguments(inv.description).startswith("f32[4,8], f32[8,16], i32[4], gradients=(x, weight)")
    offsets, lengths, table = jnp.arange(3), jnp.ones(2, jnp.int32), jnp.zeros((2, 1), jnp.int32)
    plan = paged_plan(offsets, lengths, heads=4, kv_heads=2, page_size=16, tokens=2, pages=4, page_table=table)
    call = (array(2, 4, 32), array(4, 16, 2, 2, 32), table, offsets, lengths)
    with recording() as seen:
        jax.jit(lambda q, cache, *ints: paged_attention(q, cache, *ints, plan=plan)).lower(*call)
    text = "bf16[2,4,32], bf16[4,16,2,2,32], i32[2,1], i32[3], i32[2], plan"
    assert [arguments(inv.description).partition(", softmax")[0] for inv in seen] == [text]


@pytest.mark.parametrize(("seconds", "text"), [(35.2872, "35"), (180.0, "180"), (2.54, "2.5"), (4, "4")])
def test_a_budget_is_rounded(seconds, text):
    assert rounded(seconds) == text


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([True, True, False], "bf16[4] x2, i32[8]"),
        ([False, True, False], "bf16[4] x2, i32[8], gradient of array 2 only"),
        ("damaged", "bf16[4] x2, i32[8]"),
    ],
)
def test_a_backward_call_of_some_arrays_differs_from_one_of_all(flags, text):
    arrays = [{"array": ["bfloat16", [4]]}, {"array": ["bfloat16", [4]]}, {"array": ["int32", [8]]}]
    assert arguments({"args": arrays, "steps": [["vjp", flags]]}) == text


def test_batch_sizes_are_shown_outermost_first():
    inv = Invocation(op_id="any", args=(array(4),), batch_axes=((0,), (1,)), batch_sizes=(2, 3))
    assert arguments(inv.description) == "bf16[4], vmap[2, 3]"


@pytest.mark.parametrize("call", [None, "text", {}, {"args": 3, "kwargs": [1], "steps": 1}, {"args": [{"array": 1}]}])
def test_values_without_a_description_give_an_empty_text(call):
    assert arguments(call) == ""


def test_a_configuration_shows_only_its_set_fields():
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


def test_a_line_of_any_length_is_terminated():
    many = {f"name{n}": n for n in range(10_000)}
    for text in (compact(many), arguments({"kwargs": many}), arguments({"args": [{"array": ["f", [*many.values()]]}]})):
        assert len(text) == 1000
        assert text.endswith("...")


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.26e-6, "1.3 us"), (9.94e-4, "994.0 us"), (9.9e-3, "9.90 ms"), (0.5, "500.0 ms")]
)
def test_a_time_has_a_unit(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "column"),
    [
        ([3e-6, None, 0.02], ["3.0 us", "-", "20.0 ms"]),
        ([0.5, 0.02], ["500.0 ms", "20.0 ms"]),
        ([0.0123, 0.0012], ["12.3 ms", "1.20 ms"]),
        ([None], ["-"]),
        ([], []),
    ],
)
def test_each_time_of_a_column_has_its_own_unit(seconds, column):
    assert durations(seconds) == column


def test_columns_are_as_wide_as_their_widest_cell():
    assert text_table(("a", "long"), [("wide", "b"), ("", "")]) == "a     long\nwide  b\n"


ROWS = [("flash_attention.bwd@v0", "f32[4,512,4,64] x3, causal=True", "yes"), ("rms_norm@v0", "f32[2,8]", "no")]
HEADER = ("operation", "arguments", "tuned")


def widest(text):
    return max(map(len, text.splitlines()))


def test_a_table_that_fits_is_the_same_at_every_width():
    whole = text_table(HEADER, ROWS)
    assert widest(whole) == 62
    assert text_table(HEADER, ROWS, width=62, optional=["tuned"]) == whole


def test_a_table_is_wrapped_between_words_the_widest_column_first():
    assert text_table(HEADER, ROWS, width=50).splitlines() == [
        "operation               arguments            tuned",
        "flash_attention.bwd@v0  f32[4,512,4,64] x3,  yes",
        "                        causal=True",
        "rms_norm@v0             f32[2,8]             no",
    ]


def test_a_column_that_may_be_left_out_is_where_words_do_not_fit():
    text = text_table(HEADER, ROWS, width=44, optional=["arguments", "tuned"])
    assert text.splitlines()[0].split() == ["operation", "tuned"]
    assert "flash_attention.bwd@v0" in text


def test_rows_are_paragraphs_where_nothing_else_fits():
    assert text_table(HEADER, ROWS[:1], width=40, optional=[]).splitlines() == [
        "operation  flash_attention.bwd@v0",
        "arguments  f32[4,512,4,64] x3,",
        "           causal=True",
        "tuned      yes",
    ]


@given(
    st.lists(
        st.tuples(*[st.lists(st.text("ab=[]", min_size=1, max_size=20), max_size=6).map(" ".join)] * 3), max_size=4
    ),
    st.integers(40, 130),
)
def test_no_line_is_wider_and_no_word_is_cut(rows, width):
    text = text_table(HEADER, rows, width=width)
    assert widest(text or " ") <= width
    for word in " ".join(cell for row in rows for cell in row).split():
        assert word in text.split()


def test_one_is_singular():
    assert [counted(n, "call") for n in (0, 1, 2)] == ["0 calls", "1 call", "2 calls"]
    assert counted(2, "entry", "entries") == "2 entries"


@dataclasses.dataclass(frozen=True)
class _Inner:
    z: int = 1
    a: int = 2


@dataclasses.dataclass(frozen=True)
class _Outer:
    warps: int = 4
    bwd: _Inner = _Inner()
    block: int = 64


def test_a_configuration_reads_the_same_from_memory_and_from_a_file():
    config = _Outer()
    saved = json.loads(stable_json(config))
    assert compact(config) == compact(saved) == "block=64 warps=4 bwd(a=2 z=1)"


def test_other_values_are_shown_by_repr():
    assert compact({1}) == "{1}" or compact(object).startswith("<class")


def test_a_time_from_a_file_is_rounded_as_in_memory():
    """Logs have five significant digits."""
    assert duration(3.244996e-3) == stored_time(3245.0)
