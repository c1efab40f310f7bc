# SPDX-License-Identifier: Apache-2.0
"""The kernel calls in a program's text, found by their labels and rebuilt or looked up among recorded calls."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ejkernel.ops.core.description import rebuild
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.errors import DescriptionError
from ejkernel.ops.utils.meta import is_scope
from ejkernel.ops.utils.values.payloads import labels_with_payloads

MAX_LABELS: Final = 10_000  # calls to rebuild from a text; programs have hundreds at most
_SHOWN: Final = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCalls:
    """The calls named by the labels of a text.

    Attributes:
        calls: Recorded or rebuilt calls, in order of first appearance.
        bare: Labels without a description of their call.
        refused: Labels with an unusable description, and the reasons.
    """

    calls: tuple[Invocation[Any, Any], ...]
    bare: tuple[str, ...]
    refused: Mapping[str, str]

    @property
    def labels(self) -> int:
        """Number of labels in the text."""
        return len(self.calls) + len(self.bare) + len(self.refused)

    def why_refused(self) -> list[str]:
        """Return one line for each reason, with its labels."""
        by_reason: dict[str, list[str]] = collections.defaultdict(list)
        for label, reason in self.refused.items():
            by_reason[reason].append(label)
        return [f"{listed(labels)}: {reason}" for reason, labels in by_reason.items()]


def calls_in_text(text: str, *, recorded: Mapping[str, Mapping[str, Any]] | None = None) -> ProgramCalls:
    """Return the distinct calls that the labels of a lowered program's text name.

    Recorded calls are used directly. Other calls are rebuilt from their labels if the program was lowered with
    `EJKERNEL_OPS_STAMP=json`. A text cannot import code, and can only name registered objects: see `rebuild`.

    Args:
        text: StableHLO or HLO; it need not be trusted.
        recorded: `get_invocations(device)`.
    """
    calls, bare, refused = [], [], {}
    # Skip labels of `@label`: they name functions, not kernel calls.
    for label in [label for label in labels_with_payloads(text) if not is_scope(label.op)]:
        known = (recorded or {}).get(label.op, {}).get(label.key)
        if known is not None:
            calls.append(known.invocation)
        elif label.problem:
            refused[label.text] = label.problem
        elif label.data is None:
            bare.append(label.text)
        elif len(calls) >= MAX_LABELS:
            refused[label.text] = f"the text has more than {MAX_LABELS} calls"
        else:
            try:
                calls.append(rebuild(label.data, key=label.key, op=label.op))
            except DescriptionError as error:
                refused[label.text] = str(error)
    return ProgramCalls(calls=tuple(calls), bare=tuple(bare), refused=refused)


def listed(labels: Sequence[str]) -> str:
    """Return the first labels, with the total number if it is larger."""
    return ", ".join(labels[:_SHOWN]) + (f", ... ({len(labels)} in all)" if len(labels) > _SHOWN else "")
