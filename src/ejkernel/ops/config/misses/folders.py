# SPDX-License-Identifier: Apache-2.0
"""Why a folder has no configurations: it does not exist, or a cache folder inside or around it was meant."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ejkernel import settings
from ejkernel.ops.config import estimates
from ejkernel.ops.config.misses import notes
from ejkernel.ops.utils.messages.names import nearest

_DEVICE: Final = re.compile(r"(cpu|gpu|tpu)-.+")  # a cache folder has one folder for each device
_BESIDE: Final = (notes.FOLDER, estimates.FOLDER)  # they also have one for each device
_MOST: Final = 200  # folders to look into


def fault_of(folder: Path, variable: str = "") -> str:
    """Return why a folder holds no configurations, and which one was probably meant; empty if nothing is wrong with it.

    Args:
        folder: The folder.
        variable: The environment variable that names it, if any.
    """
    if not os.path.isdir(folder):
        similar = nearest(folder.name, (place.name for place in _folders_in(folder.parent)))
        meant = "" if similar is None else f", but there is {folder.parent / similar}"
        return f"there is no folder {folder}{f', named by {variable}' if variable else ''}{meant}"
    found = _meant(folder)
    how = f"set {variable}={found}" if variable else f"name {found}"
    return "" if found is None else f"{folder} has no configurations, but {found} has some: {how}"


def _meant(folder: Path) -> Path | None:
    """Return the cache folder that `folder` contains or belongs to; `None` if it is one, or none is near."""
    if _is_cache(folder):
        return None
    above = (folder.parents[at] for at, place in enumerate((folder, folder.parent)) if _DEVICE.fullmatch(place.name))
    return next(itertools.chain(above, filter(_is_cache, _below(folder))), None)


def _below(folder: Path) -> Iterator[Path]:
    """Yield the folders in a folder, and the cache folders of the usual name in those."""
    inner = _folders_in(folder)
    yield from inner
    yield from (each / settings.CACHE_FOLDER for each in inner)


def _is_cache(folder: Path) -> bool:
    names = [place.name for place in _folders_in(folder)]
    return any(name in _BESIDE or _DEVICE.fullmatch(name) for name in names)


def _folders_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as found:
            return sorted(Path(each.path) for each in itertools.islice(found, _MOST) if each.is_dir())
    except OSError:  # it does not exist, or may not be read
        return []
