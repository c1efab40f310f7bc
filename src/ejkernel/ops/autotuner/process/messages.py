# SPDX-License-Identifier: Apache-2.0
"""What a worker is asked, and what it says: these objects, pickled, are all that goes through their pipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """Asks a worker to call a function, which is at the top of a module."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """Something that a worker says."""


@dataclasses.dataclass(frozen=True, slots=True)
class Began(Message):
    """Its device works on something else now; see `WorkerStatus`."""

    what: str
    configs: Sequence[Any]
    allowed: float


@dataclasses.dataclass(frozen=True, slots=True)
class Compiling(Message):
    """These candidates are compiled now, and no others."""

    configs: Sequence[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Happened(Message):
    """An event of the search that it carries out."""

    event: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Warned(Message):
    """A warning, which the parent gives in its place; its text, if it cannot be pickled."""

    warning: Warning | str


@dataclasses.dataclass(frozen=True, slots=True)
class Returned(Message):
    """The function has returned."""

    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Raised(Message):
    """The function has raised, or could not be called."""

    error: BaseException
