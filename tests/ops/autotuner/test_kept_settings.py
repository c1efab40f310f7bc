# SPDX-License-Identifier: Apache-2.0
"""Changes of `jax.config` by a candidate are undone, and reported with its name."""

from __future__ import annotations

import re
import warnings

import jax
import numpy as np
import pytest
from tests.ops.autotuner.made_up_times import interleaved_with
from tests.ops.sample_kernels import told_apart

from ejkernel import compat
from ejkernel.ops import Invocation, Kernel, TuningWarning
from ejkernel.ops.autotuner.bench import timing
from ejkernel.ops.autotuner.bench.oracle import KeptSettings
from ejkernel.ops.autotuner.tuner import Autotuner
from ejkernel.ops.core.context import numerics_in_force

X = np.ones(5, np.float32)


@pytest.fixture(autouse=True)
def as_before():
    before = compat.settings.process_settings()
    yield
    compat.settings.put_back(before)


class Meddling(Kernel[int, jax.Array]):
    """Its configuration 2 calls `meddle` when it is traced or, with `late`, when it runs."""

    def __init__(self, option, value, late=False):
        super().__init__("meddling")
        self.option, self.value, self.late = option, value, late

    def meddle(self, x=None):
        jax.config.update(self.option, self.value)
        return x

    def run(self, x, *, cfg):
        if cfg == 2 and not self.late:
            self.meddle()
        if cfg == 2 and self.late:
            x = jax.pure_callback(self.meddle, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return told_apart(x + x, cfg)

    def config_space(self, inv):
        return [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True], ids=["when it is traced", "when it runs"])
@pytest.mark.parametrize(
    ("option", "value"),
    [("jax_default_matmul_precision", "highest"), ("jax_debug_nans", True), ("jax_enable_x64", True)],
)
def test_a_change_of_jax_config_is_undone_and_reported(option, value, late, monkeypatch):
    monkeypatch.setattr(timing, "interleaved", interleaved_with(float))
    before, kernel = compat.settings.process_settings(), Meddling(option, value, late)
    with pytest.warns(TuningWarning) as caught:
        Autotuner(width=1).tune(Invocation(kernel=kernel, args=(X,)), kernel)
    assert compat.settings.process_settings() == before
    messages = [str(warning.message) for warning in caught if option in str(warning.message)]
    assert len(messages) == 1
    who = "(2|one of 2, 1|one of 1, 2)"  # the other may run at the same time
    change = re.escape(f"changed jax.config.{option} from {before[option]!r} to {value!r}; the change is undone")
    assert re.match(f"meddling: {who} {change}", messages[0])


def test_candidates_that_compile_side_by_side_are_all_named():
    kept = KeptSettings("op")
    with kept.during("A"), kept.during("B"):
        jax.config.update("jax_debug_nans", True)
    with pytest.warns(TuningWarning, match=r"op: one of A, B changed jax.config.jax_debug_nans from False to True"):
        kept.tell()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept.tell()


def test_the_running_candidate_at_every_change_is_named():
    kept = KeptSettings("op")
    for who in (("A", "B"), ("B",), ("B", "C")):
        with kept.during(*who):
            jax.config.update("jax_debug_nans", True)
    with pytest.warns(TuningWarning, match="op: B changed jax.config.jax_debug_nans"):
        kept.tell()


def test_settings_of_a_thread_are_unchanged():
    kept = KeptSettings("op")
    with jax.default_matmul_precision("float32"):
        with kept.during("A"):
            pass
        assert numerics_in_force().default_matmul_precision == "float32"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept.tell()
