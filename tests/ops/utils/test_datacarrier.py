# SPDX-License-Identifier: Apache-2.0
"""FwdParams and BwdParams: construction, checks, identity."""

from __future__ import annotations

import dataclasses

import pytest

from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils.datacarrier import BwdParams, FwdParams
from ejkernel.ops.utils.storage.serialize import from_json, to_json

FIELDS = ("q_blocksize", "kv_blocksize", "num_warps", "num_stages")
both = pytest.mark.parametrize("cls", [FwdParams, BwdParams])


@both
def test_fields_are_given_by_name_and_default_to_none(cls):
    params = cls(q_blocksize=128, kv_blocksize=256)
    assert tuple(getattr(params, name) for name in FIELDS) == (128, 256, None, None)
    assert tuple(field.name for field in dataclasses.fields(cls)) == FIELDS


@both
@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", [0, -1, 64.0, True, "64"])
def test_a_value_must_be_a_positive_integer(cls, name, value):
    with pytest.raises(ConfigError) as caught:
        cls(**{name: value})
    assert f"{name} must be a positive integer or None, got {value!r}." == str(caught.value)


@both
def test_equal_content_is_one_key_of_a_dict(cls):
    assert len({cls(num_warps=4), cls(num_warps=4)}) == 1


@both
def test_an_instance_cannot_be_changed(cls):
    with pytest.raises(dataclasses.FrozenInstanceError):
        cls().num_warps = 4


@both
def test_an_instance_survives_json(cls):
    params = cls(q_blocksize=64, num_stages=2)
    assert params == from_json(to_json(params), cls)


def test_the_directions_are_never_equal():
    assert FwdParams(num_warps=4) != BwdParams(num_warps=4)
