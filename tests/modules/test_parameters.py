# SPDX-License-Identifier: Apache-2.0
"""Each parameter of a module is documented at its function and taken by name where the operation handles it."""

from __future__ import annotations

import inspect
import re

import pytest

from ejkernel import modules
from ejkernel.kernels.grouped_matmul.activation import GroupedMatmulActivation

OPERATIONS = {
    "flash_attention": [modules.FlashAttention],
    "grouped_matmul": [
        modules.GroupedMatmul,
        GroupedMatmulActivation,
        modules.QuantizedGroupedMatmul,
        modules.QuantizedGroupedActivation,
    ],
    "grouped_matmul_wgrad": [modules.GroupedMatmulWgrad, modules.QuantizedGroupedWgrad],
    "layer_norm": [modules.LayerNorm],
    "linear_cross_entropy": [modules.LinearCrossEntropy],
    "paged_attention": [modules.PagedAttention],
    "quantize_both": [modules.Quantize],
    "quantized_matmul": [modules.QuantizedMatmul, modules.QuantizedGroupedActivation],
    "rms_norm": [modules.RmsNorm, modules.QuantizedRmsNorm],
    "token_log_probs": [modules.LinearCrossEntropy],
}
IN_THE_MODULE = {  # parameters that the function itself handles
    "flash_attention": {"bucket_lengths", "query_lengths", "key_lengths"},
    "linear_cross_entropy": {  # the operation returns statistics of each token, and the function makes the loss of them
        *("ignore_index", "label_smoothing", "reduction", "token_weights", "z_loss"),
        *("return_accuracy", "return_lse"),
    },
    "rms_norm": {"axis"},
    "token_log_probs": {"ignore_index", "return_entropy", "temperature"},
}


WITHOUT_OPERATION = (
    *("append_to_pages", "copy_pages", "paged_plan", "ragged_paged_attention"),
    *("from_zigzag", "to_zigzag"),
    *("quantize", "quantized_dense", "quantized_grouped_dense"),
)


def functions():
    return {name for name, value in vars(modules).items() if inspect.isfunction(value) and not name.startswith("_")}


def test_all_functions_are_tested_here():
    assert functions() == {*OPERATIONS, *WITHOUT_OPERATION}


@pytest.mark.parametrize("name", [*OPERATIONS, *WITHOUT_OPERATION])
def test_each_parameter_is_documented_at_its_function(name):
    function = getattr(modules, name)
    text = inspect.getdoc(function).partition("\nArgs:\n")[2].partition("\n\n")[0]
    documented = {item for line in re.findall(r"(?m)^    ([\w, ]+):", text) for item in line.split(", ")}
    assert documented == set(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", OPERATIONS)
def test_prepare_takes_each_parameter_by_its_name(name):
    taken = {item for operation in OPERATIONS[name] for item in inspect.signature(operation.prepare).parameters}
    assert set(inspect.signature(getattr(modules, name)).parameters) - taken == IN_THE_MODULE.get(name, set()) | {"cfg"}


@pytest.mark.parametrize("name", OPERATIONS)
def test_prepare_takes_no_parameter_without_a_name(name):
    kinds = {p.kind for operation in OPERATIONS[name] for p in inspect.signature(operation.prepare).parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
