# SPDX-License-Identifier: Apache-2.0
"""Results of searches that measured nothing."""

from __future__ import annotations

from ejkernel.ops.autotuner.measure.measurement import Measurement
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, Outcome


def found(inv, config):
    """A complete search of one candidate."""
    measured = Outcome(config=config, status="measured", measurement=Measurement(samples=(1e-6,)))
    return AutotuneData(inv=inv, config=config, outcomes=(measured,), seconds=0.0, checked=("outputs",))
