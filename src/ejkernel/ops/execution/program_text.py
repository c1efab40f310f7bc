# SPDX-License-Identifier: Apache-2.0
"""The kernel calls in a program's text, from its labels alone or from what was recorded beside it."""

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

MAX_LABELS: Final = 10_000  # of which calls are rebuilt; programs have hundreds at most
_SHOWN: Final = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCalls:
    """What the labels of a text came to.

    Attributes:
        calls: The calls that are known, or were rebuilt; in order of first appearance.
        bare: Labels that carry no description of their call.
        refused: Labels whose description is of no use here, with the reasons.
    """

    calls: tuple[Invocation[Any, Any], ...]
    bare: tuple[str, ...]
    refused: Mapping[str, str]

    @property
    def labels(self) -> int:
        """How many labels of calls the text has."""
        return len(self.calls) + len(self.bare) + len(self.refused)

    def why_refused(self) -> list[str]:
        """Return one line for each reason, with the labels that it holds for."""
        by_reason: dict[str, list[str]] = collections.defaultdict(list)
        for label, reason in self.refused.items():
            by_reason[reason].append(label)
        return [f"{listed(labels)}: {reason}" for reason, labels in by_reason.items()]


def calls_in_text(text: str, *, recorded: Mapping[str, Mapping[str, Any]] | None = None) -> ProgramCalls:
    """Return the distinct calls that the labels of a lowered program's text name.

    A call that was recorded is taken as it is; another is rebuilt of what its label carries, if the program was
    lowered with `EJKERNEL_OPS_STAMP=json`. Nothing in a text can import code, or choose any but what was registered:
    see `rebuild`.

    Args:
        text: StableHLO or HLO; it may come from anywhere.
        recorded: `get_invocations(device)`.
    """
    calls, bare, refused = [], [], {}
    # What `@label` named is a function, with no kernel behind it.
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
    """Return the first labels, and a sign that there are more."""
    return ", ".join(labels[:_SHOWN]) + (f", ... ({len(labels)} in all)" if len(labels) > _SHOWN else "")
