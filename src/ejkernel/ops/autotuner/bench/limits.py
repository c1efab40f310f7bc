# SPDX-License-Identifier: Apache-2.0
"""Time limits for the steps of a search."""

from __future__ import annotations

import dataclasses

from ejkernel.ops.autotuner.compile.threads import AdaptiveTimeout


@dataclasses.dataclass(slots=True, kw_only=True)
class Limits:
    """Time limits for the steps of a search; without a budget, only compiling can be abandoned in this process.

    Attributes:
        compile: For lowering and compiling one candidate.
        run: For the first call of one candidate.
        idle: Seconds of silence while measuring.
    """

    compile: AdaptiveTimeout = dataclasses.field(default_factory=lambda: AdaptiveTimeout(first=300.0, least=30.0))
    run: AdaptiveTimeout = dataclasses.field(
        default_factory=lambda: AdaptiveTimeout(first=120.0, least=20.0, factor=50.0)
    )
    idle: float = 60.0
