# SPDX-License-Identifier: Apache-2.0
"""Undoes changes of `jax.config` by candidates."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from ejkernel import compat
from ejkernel.ops.errors import TuningWarning
from ejkernel.ops.utils.messages.warn import warn


class KeptSettings:
    """Undoes changes of `jax.config` by candidates, and reports them.

    An option changed by one candidate applies to the whole process: to the other candidates, and to the user's program
    after the search. Candidates compile side by side, so the warning names all candidates under way at the change.

    Args:
        op_id: The kernel's name in warnings.
    """

    def __init__(self, op_id: str) -> None:
        self._op_id = op_id
        self._before = compat.process_settings()
        self._under_way: list[str] = []
        self._changes: dict[tuple[str, str, str], list[str]] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def during(self, *candidates: str) -> Iterator[None]:
        """Undo changes by the given candidates at the end of the `with` block; `tell` reports them."""
        with self._lock:
            self._under_way += candidates
        try:
            yield
        finally:
            with self._lock:
                changed = compat.put_back(self._before)
                suspects = list(dict.fromkeys(self._under_way))
                for name, (before, after) in changed.items():
                    known = self._changes.setdefault((name, repr(before), repr(after)), list(suspects))
                    # A candidate under way at every change is the likely cause.
                    known[:] = [each for each in known if each in suspects] or suspects
                for each in candidates:
                    self._under_way.remove(each)

    def tell(self) -> None:
        """Warn of each option changed and put back."""
        with self._lock:
            changes, self._changes = self._changes, {}
        for (name, before, after), suspects in changes.items():
            change = f"changed jax.config.{name} from {before} to {after}; the change is undone"
            hint = "inside a kernel, use a context, such as `with jax.default_matmul_precision(...)`"
            text = f"{self._op_id}: {_any_of(suspects)} {change}; {hint}."
            warn(text, TuningWarning)


def _any_of(suspects: list[str]) -> str:
    return suspects[0] if len(suspects) == 1 else f"one of {', '.join(suspects)}" if suspects else "the kernel"
