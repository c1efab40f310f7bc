# SPDX-License-Identifier: Apache-2.0
"""How long the parts of a search may take."""

from __future__ import annotations

import dataclasses

from ejkernel.ops.autotuner.compile.threads import AdaptiveTimeout


@dataclasses.dataclass(slots=True, kw_only=True)
class Limits:
    """How long the parts of a search may take; without a budget only compiling can be given up in this process.

    Attributes:
        compile: Lowering and compiling one candidate.
        run: The first call of one candidate.
        idle: A race, without a sign of life.
    """

    compile: AdaptiveTimeout = dataclasses.field(default_factory=lambda: AdaptiveTimeout(first=300.0, least=30.0))
    run: AdaptiveTimeout = dataclasses.field(
        default_factory=lambda: AdaptiveTimeout(first=120.0, least=20.0, factor=50.0)
    )
    idle: float = 60.0
