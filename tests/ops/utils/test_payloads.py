# SPDX-License-Identifier: Apache-2.0
"""Payloads of labels, read from both forms of a program's text."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ejkernel.ops import Kernel, label, recording
from ejkernel.ops.utils.meta import LABEL_RE, extract_labels_from_hlo_text
from ejkernel.ops.utils.values.payloads import MAX_PAYLOAD, labels_with_payloads

KEY = "0123456789abcdef"
NAME = label("op@v0", KEY)
X = jnp.ones((4, 4))


class Noted(Kernel[int, jax.Array]):
    """Takes a note that says nothing."""

    def run(self, x, *, note="", cfg):
        return jnp.tanh(x)

    def heuristic_cfg(self, inv):
        return 0


NOTED = Noted("noted")


def lowered(note, monkeypatch, stamp="json"):
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", stamp)
    with recording() as seen:
        program = jax.jit(lambda x: NOTED(x, note=note)).lower(X)
    return program, seen[0]


@pytest.mark.parametrize("dialect", ["stablehlo", "hlo"])
@pytest.mark.parametrize("note", ["plain", 'a "quote"', "\\22 \\", "}{][=", "é\n\t\x00\x7f", "</script>", "\ud7ff"])
def test_a_payload_is_read_from_either_text(note, dialect, monkeypatch):
    program, inv = lowered(note, monkeypatch)
    (found,) = labels_with_payloads(program.as_text(dialect=dialect))
    assert (found.op, found.key, found.data, found.problem) == ("noted@v0", inv.call_key, inv.description, "")


@pytest.mark.parametrize("dialect", ["stablehlo", "hlo"])
def test_a_label_with_its_key_alone_carries_no_description(dialect, monkeypatch):
    program, _ = lowered("", monkeypatch, stamp="hash")
    (found,) = labels_with_payloads(program.as_text(dialect=dialect))
    assert (found.data, found.problem) == (None, "")


def mlir(payload):
    return f'"{NAME}" = "{payload}"'


@pytest.mark.parametrize(
    "text",
    [
        mlir("{"),
        mlir("{} {}"),
        mlir("{\\22a\\22:NaN}"),
        mlir("{\\22a\\22:1,\\22a\\22:2}"),
        mlir("{\\22a\\22:" + "[" * 100_000),
        mlir("{\\FF\\FE}"),
        mlir("{\\22a\\22:" + "9" * 10_000 + "}"),
        f"{NAME}={{",
        f'{NAME}={{"a":1',
        f"{NAME}={{1:2}}",
    ],
    ids=lambda text: text[:60],
)
def test_a_payload_that_cannot_be_read_is_a_problem(text):
    (found,) = labels_with_payloads(text)
    assert found.data is None
    assert "is not a description" in found.problem


@pytest.mark.parametrize(
    "text", [NAME, f"{NAME}=", mlir(""), mlir("[1]"), f'"{NAME}" = 3', f'"{NAME}" = "{{', NAME * 2]
)
def test_a_label_without_a_description_is_no_problem(text):
    (found, *_) = labels_with_payloads(text)
    assert (found.data, found.problem) == (None, "")


def test_of_several_the_first_that_can_be_read_counts():
    texts = [mlir(KEY), mlir("{"), mlir("{\\22a\\22:1}"), mlir("{\\22a\\22:2}")]
    (found,) = labels_with_payloads("\n".join(texts))
    assert found.data == {"a": 1}


def test_a_payload_without_end_is_not_followed_for_ever():
    text = f'"{NAME}" = "{{' + "x" * (2 * MAX_PAYLOAD) + '"'
    (found,) = labels_with_payloads(text)
    assert found.data is None


def test_labels_come_in_order_of_first_appearance():
    names = [label(f"op{n}@v0", KEY) for n in (3, 1, 2)]
    text = " ".join([*names, *reversed(names)])
    assert [found.text for found in labels_with_payloads(text)] == names


def test_long_words_take_no_longer_than_short_ones():
    """The constants of a program are words of megabytes; time quadratic in that would never end."""
    text = 'dense<"0x' + "3F80ABCD" * 1_000_000 + f'"> {mlir("{}")}'
    assert extract_labels_from_hlo_text(text) == [NAME]


@given(st.text(alphabet='abc09_.-#@v:" ={}\\\n', max_size=60), st.sampled_from(["", NAME, mlir("{}"), "x" + NAME]))
def test_labels_are_those_that_the_expression_finds(text, more):
    text += more
    expected = list(dict.fromkeys(match.group() for match in LABEL_RE.finditer(text)))
    assert extract_labels_from_hlo_text(text) == expected


@given(st.text(alphabet='ab#@v0:="{}[],1\\2 \n', max_size=80))
def test_any_text_can_be_read(text):
    for found in labels_with_payloads(f'{NAME}{text} "{NAME}" = {text}'):
        assert found.data is None or json.dumps(found.data)
