# SPDX-License-Identifier: Apache-2.0
"""Names the configuration if a kernel ends the process, e.g. by a segmentation fault.

Python's `faulthandler` then writes the stack to stderr. The calls of a kernel run inside a frame with the name of their
configuration, so that the stack contains it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

from ejkernel.ops.utils.formatting import compact

_FILE: Final = "check_kernel"


@contextlib.contextmanager
def reported_crashes() -> Iterator[None]:
    """Write the stack to stderr if the process dies inside the context; leave an active `faulthandler` alone."""
    try:
        descriptor = -1 if faulthandler.is_enabled() or sys.stderr is None else sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):  # a replaced stderr, which has no file
        descriptor = -1
    if descriptor < 0:
        yield
        return
    faulthandler.enable(file=descriptor)
    try:
        yield
    finally:
        faulthandler.disable()


def named_after(config: object, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which runs below a frame with the name of the configuration."""
    called = "the heuristic" if config is None else compact(config)
    code = _frame.__code__.replace(co_filename=_FILE, co_name=f"configuration {called}", co_firstlineno=1)
    frame = types.FunctionType(code, {})
    return lambda *args: frame(function, *args)


def _frame(function: Callable[..., Any], *args: object) -> Any:
    return function(*args)
