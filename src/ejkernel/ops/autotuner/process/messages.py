# SPDX-License-Identifier: Apache-2.0
"""Requests to a worker and its messages. The pipe between them carries only these objects, pickled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """Asks a worker to call a function defined at the top level of a module."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """Base class of a worker's messages."""


@dataclasses.dataclass(frozen=True, slots=True)
class Began(Message):
    """The device starts another step; see `WorkerStatus`."""

    what: str
    configs: Sequence[Any]
    allowed: float


@dataclasses.dataclass(frozen=True, slots=True)
class Compiling(Message):
    """Exactly these candidates are being compiled."""

    configs: Sequence[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Happened(Message):
    """An event of the worker's search."""

    event: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Warned(Message):
    """A warning for the parent to issue; its text if it cannot be pickled."""

    warning: Warning | str


@dataclasses.dataclass(frozen=True, slots=True)
class Returned(Message):
    """The function returned."""

    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Raised(Message):
    """The function raised, or could not be called."""

    error: BaseException
