# SPDX-License-Identifier: Apache-2.0
"""Tracebacks of our errors: short, and with the line of the call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from jax._src import source_info_util as _source_info
from jax._src import traceback_util as _traceback_util

import ejkernel

_E = TypeVar("_E", bound=BaseException)

# JAX's own filter then leaves our frames out of tracebacks, unless JAX_TRACEBACK_FILTERING=off. Unlike its
# `register_exclusion`, this leaves the source lines in programs as they are.
_PARTS = ("_exclude_paths", "_filtering_mode", "filter_traceback")
_filters_frames = all(hasattr(_traceback_util, name) for name in _PARTS)  # without them tracebacks are only longer
if _filters_frames:
    _traceback_util._exclude_paths.append(str(Path(str(ejkernel.__file__)).parent))

_points_at_lines = _filters_frames and all(
    hasattr(_source_info, name) for name in ("JaxStackTraceBeforeTransformation", "current", "has_user_context")
)
_HERE = "The line above called ejkernel. The error itself follows below, after the line that compiled the program."


def without_our_frames(error: _E) -> _E:
    """Return an error without the frames of JAX and ejkernel, which `JAX_TRACEBACK_FILTERING=off` keeps."""
    if not _filters_frames or error.__traceback__ is None or _traceback_util._filtering_mode() == "off":
        return error
    return error.with_traceback(_traceback_util.filter_traceback(error.__traceback__))


@contextlib.contextmanager
def pointing_at_the_call(kind: type[Exception]) -> Iterator[None]:
    """Show the line of the call being lowered in the traceback of errors of this kind.

    JAX does so too, but repeats the whole message there.
    """
    try:
        yield
    except kind as error:
        source: Any = _source_info.current().traceback if _points_at_lines else None
        if source is not None and not _source_info.has_user_context(error):
            lines = _traceback_util.filter_traceback(source.as_python_traceback())
            if lines is not None:
                shown = _source_info.JaxStackTraceBeforeTransformation(_HERE).with_traceback(lines)
                shown.__cause__, shown.__context__ = error.__cause__, error.__context__
                shown.__suppress_context__ = error.__suppress_context__
                error.__context__, error.__cause__ = None, shown
        raise
