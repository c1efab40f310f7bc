# SPDX-License-Identifier: Apache-2.0
"""`jax.config` as it was before the search, whatever a candidate does to it."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator

from ejkernel import compat
from ejkernel.ops.errors import TuningWarning


class KeptSettings:
    """Undoes what candidates change of `jax.config`, and reports it.

    An option that a candidate changes holds for the whole process: for the other candidates, and for the user's program
    after the search. Candidates compile side by side, so the warning names each that was under way.

    Args:
        op_id: What warnings call the kernel.
    """

    def __init__(self, op_id: str) -> None:
        self._op_id = op_id
        self._before = compat.process_settings()
        self._under_way: list[str] = []
        self._changes: dict[tuple[str, str, str], list[str]] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def during(self, *who: str) -> Iterator[None]:
        """Undo, at the end of the `with` block, what the candidates `who` changed in it; `tell` reports it."""
        with self._lock:
            self._under_way += who
        try:
            yield
        finally:
            with self._lock:
                changed = compat.put_back(self._before)
                suspects = list(dict.fromkeys(self._under_way))
                for name, (before, after) in changed.items():
                    known = self._changes.setdefault((name, repr(before), repr(after)), list(suspects))
                    # Who was there each time is to blame.
                    known[:] = [each for each in known if each in suspects] or suspects
                for each in who:
                    self._under_way.remove(each)

    def tell(self) -> None:
        """Warn of each option that was changed and put back."""
        with self._lock:
            changes, self._changes = self._changes, {}
        for (name, before, after), suspects in changes.items():
            change = f"changed jax.config.{name} from {before} to {after}; the change is undone"
            hint = "inside a kernel, use a context, such as `with jax.default_matmul_precision(...)`"
            text = f"{self._op_id}: {_any_of(suspects)} {change}; {hint}."
            warnings.warn(text, TuningWarning, stacklevel=2)


def _any_of(suspects: list[str]) -> str:
    return suspects[0] if len(suspects) == 1 else f"one of {', '.join(suspects)}" if suspects else "the kernel"
