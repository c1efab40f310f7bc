# SPDX-License-Identifier: Apache-2.0
"""`autotune(..., target=...)`: candidates for another device are estimated or compiled, and never measured."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import autotune
from ejkernel.ops.autotuner.compile.bundles import read_bundle
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.autotuner.trials.candidates import Program
from ejkernel.ops.config.estimates import EstimateFiles
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.errors import ArgumentError, CandidateError, ConfigError
from ejkernel.ops.execution import targeted
from ejkernel.ops.execution.executor import default_executor

X = jax.ShapeDtypeStruct((8,), jnp.int32)


class Twice(Kernel[int, jax.Array]):
    """`2 * x`; the fake simulator takes `cfg` thousand cycles, and refuses 3."""

    def run(self, x, *, cfg):
        return jax.named_call(lambda x: x + x, name=f"of_{cfg}")(x)

    def heuristic_cfg(self, inv):
        assert inv.platform in ("tpu", "cpu")
        return 2

    def config_space(self, inv):
        return [1, 3]


TWICE = Twice("twice_for_a_target")


@pytest.fixture
def simulated(monkeypatch):
    def simulate(inv, choice):
        if choice.config == 3:
            raise CandidateError("no such unit")
        return Program(cycles=choice.config * 1000.0)

    own = targeted.estimate_calls
    monkeypatch.setattr(targeted, "estimate_calls", lambda *args, **more: own(*args, simulate=simulate, **more))


@pytest.mark.parametrize("what", [TWICE, lambda x: TWICE(x) + 0])
def test_candidates_are_estimated_for_a_kernel_and_for_a_function(what, simulated):
    found = autotune(what, X, target="tpu_v6e", estimate=True)
    assert found.device == "tpu:tpu_v6_lite"
    assert found.statuses == {"estimated": 2, "not estimated": 1}
    assert [row.config for row in found.estimates[0].ranked] == [1, 2]
    assert "not measured" in str(found)
    assert "1 x not estimated: no such unit" in str(found)
    files = EstimateFiles(default_executor().chooser.persistent.path)
    assert files.load(found.estimates[0].config_key) == found.estimates[0]


def test_own_candidates_and_several_calls_are_estimated(simulated):
    longer = jax.ShapeDtypeStruct((16,), jnp.int32)
    found = autotune(TWICE, calls=[(X,), (longer,)], configs=[5], target=Target.named("tpu_v6e"), estimate=True)
    assert [[row.config for row in each.rows] for each in found.estimates] == [[2, 5], [2, 5]]


@pytest.mark.slow
def test_candidates_are_compiled_into_a_bundle(tmp_path):
    found = autotune(TWICE, X, target="here", output=tmp_path / "bundle")
    assert found.statuses == {"ready": 1, "same": 2}
    assert [call.configs for call in read_bundle(tmp_path / "bundle")] == [[2, 1, 3]]
    assert re.search(r"twice_for_a_target@v0\s+2 same, 1 ready", str(found))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"target": "tpu_v6e"},
            r"cannot be measured here: .*cpu:.* Pass estimate=True for .* output='FOLDER'",
        ),
        ({"target": "nvidia_h200"}, r"target='nvidia_h200' cannot be measured here: .*cpu:.*\. Pass output='FOLDER'"),
        ({"target": "here"}, "leave out target to measure"),
        ({"target": "tpu_v6e", "estimate": True, "output": "x"}, "exclude each other"),
        ({"target": "tpu_v4", "estimate": True}, "estimates need one of the targets"),
        ({"target": "tpu_v9", "estimate": True}, "target must be one of here"),
        ({"target": "tpu_v6e", "estimate": True, "inputs": True}, "nothing is measured"),
    ],
)
def test_what_cannot_be_prepared_is_an_error_that_names_the_way(options, message, simulated):
    with pytest.raises((ArgumentError, ConfigError), match=message):
        autotune(TWICE, X, **options)


def test_a_function_without_operations_gives_a_warning(simulated):
    with pytest.warns(match="made no call of an operation"):
        assert autotune(jnp.sin, jnp.ones(3), target="tpu_v6e", estimate=True).estimates == ()
