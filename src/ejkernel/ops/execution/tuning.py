# SPDX-License-Identifier: Apache-2.0
"""Re-exports of the public names for tuning, for imports from `ejkernel.ops.execution.tuning`."""

from __future__ import annotations

from ejkernel.ops.autotuner.measure.measurement import benchmark as benchmark
from ejkernel.ops.autotuner.trials.result import AutotuningResult as AutotuningResult
from ejkernel.ops.autotuner.trials.result import Entry as Entry
from ejkernel.ops.autotuner.tuner import Autotuner as Autotuner
from ejkernel.ops.execution.offline import autotune as autotune
from ejkernel.ops.execution.offline import autotune_recorded as autotune_recorded
