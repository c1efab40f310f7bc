# SPDX-License-Identifier: Apache-2.0
"""Where machines share packs: a place by its URL, over `fsspec`, which is an extra.

All that is asked of a store is to list, read, write and remove whole objects. A pack's name is the digest of what it
holds, so writers never write different things under one name, and none needs to read before it writes.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ejkernel import settings
from ejkernel.ops.config._writing import write_chunks
from ejkernel.ops.config.shared import packs
from ejkernel.ops.errors import ConfigError, EjkernelError
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.printable import printable

MOST: Final = 10_000  # objects that a store is listed for
REMEDY: Final = "`ejkernel cache prune URL` makes few of many"
# The others that fsspec knows may unpack archives, run templates or mount what the place's content says.
PROTOCOLS: Final = ("file", "local", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "http", "https")
_USER: Final = re.compile(r"//[^/@]*@")


class UnreachableError(EjkernelError, OSError):
    """A store cannot be read or written now, for the reason in the message."""


def shown(url: str) -> str:
    """Return a URL as messages have it, in printable characters: without users, passwords and signatures."""
    return printable(_USER.sub("//", url.partition("?")[0]))


def check_protocols(url: str) -> None:
    """Raise unless a URL has one of `PROTOCOLS`, or others that the user allowed by `EJKERNEL_CACHE_PROTOCOLS`.

    Of a chain, such as `simplecache::s3://bucket`, the user must have allowed each protocol but the last.

    Raises:
        ConfigError: it has another protocol.
    """
    own = settings.current().cache_protocols
    *outer, inner = (part.partition("://")[0].lower() for part in url.split("::"))  # as fsspec splits it
    refused = [name for name in outer if name not in own] or [inner] * (inner not in (*PROTOCOLS, *own))
    if refused:
        name = printable(refused[0].partition("?")[0])
        raise ConfigError(
            f"the shared cache {shown(url)} {'is a chain of URLs with' if outer else 'has'} the protocol {name!r}; "
            f"allowed are {', '.join((*PROTOCOLS, *own))}, and no chains. If you trust what {name!r} does with the "
            f"content of the place, set EJKERNEL_CACHE_PROTOCOLS={name}."
        )


class Store:
    """A place where packs are, by its URL.

    Args:
        url: What `fsspec` understands, such as `s3://bucket/prefix`, `gs://...`, `file:///...`, `memory://...`, with
            one of `PROTOCOLS` or of `EJKERNEL_CACHE_PROTOCOLS`; how to get in is what its own settings and the
            environment say.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._opened: tuple[Any, str] | None = None
        self._empty: frozenset[str] = frozenset()  # objects that had nothing when they were listed

    def __repr__(self) -> str:
        return f"Store({shown(self.url)!r})"

    def sizes(self, most: float = MOST) -> dict[str, int]:
        """Return the names of the packs that are there, with their sizes; a place that is not there has none.

        Raises:
            UnreachableError: they cannot be listed, or are more than `most`.
        """
        with self._errors("listed"):
            system, root = self._system()
            system.invalidate_cache()  # a listing from memory would not have what others have added
            try:
                found = system.ls(root, detail=True)
            except FileNotFoundError:
                found, self.is_there = [], False
            else:  # what is listed as itself is a file
                self.is_there = [item["name"] for item in found] != [root]
        sizes = {posixpath.basename(item["name"]): item.get("size") for item in found if item.get("type") == "file"}
        ours = {name: size for name, size in sizes.items() if packs.is_name(name) and type(size) is int}
        if len(ours) > most:
            raise UnreachableError(f"{shown(self.url)} holds more than {most} packs; {REMEDY}.")
        self._empty = frozenset(name for name, size in ours.items() if size == 0)
        return ours

    def read(self, name: str) -> bytes | None:
        """Return a pack that was checked, or `None` if it is gone.

        Raises:
            UnusableError: it is no such pack, or too large.
            UnreachableError: it cannot be read.
        """
        raw = self.raw(name)
        if raw is not None:
            packs.check(name, raw)
        return raw

    def raw(self, name: str) -> bytes | None:
        """Return what is there under the name of a pack, or `None` if it is gone.

        Raises:
            DamagedError: it is larger than any pack.
            UnreachableError: it cannot be read.
        """
        if name in self._empty:  # of which S3 has no range
            return b""
        with self._errors("read"):
            system, root = self._system()
            try:
                raw: bytes = system.cat_file(posixpath.join(root, name), start=0, end=packs.LARGEST + 1)
            except FileNotFoundError:  # merged, since it was listed
                return None
        if len(raw) > packs.LARGEST:
            raise packs.DamagedError(f"it has more than {packs.LARGEST} bytes")
        return raw

    def write(self, name: str, raw: bytes) -> None:
        """Write a pack; when this returns, the store has taken it.

        Raises:
            UnreachableError: it cannot be written.
        """
        self._empty -= {name}
        with self._errors("written"):
            system, root = self._system()
            path = posixpath.join(root, name)
            if "file" in _protocols(system):  # fsspec would write it in place
                write_chunks(Path(path), lambda: (raw,))
                return
            system.pipe_file(path, raw)
            system.invalidate_cache()
            size = system.info(path).get("size")
        if size != len(raw):
            raise UnreachableError(f"{shown(self.url)} took {size} bytes of {len(raw)} of {name}.")

    def remove(self, name: str) -> None:
        """Remove a pack, if it is there.

        Raises:
            UnreachableError: it cannot be removed.
        """
        with self._errors("changed"):
            system, root = self._system()
            with contextlib.suppress(FileNotFoundError):
                system.rm_file(posixpath.join(root, name))

    def _system(self) -> tuple[Any, str]:
        if self._opened is None:
            check_protocols(self.url)
            try:
                from fsspec.core import url_to_fs
            except ImportError as error:
                text = f"{shown(self.url)} needs fsspec: pip install fsspec, and what its kind needs."
                raise ConfigError(text) from error
            system, root = url_to_fs(self.url)
            self._opened = system, str(root)
        return self._opened

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Make one kind of error of all that a store's own library raises."""
        try:
            yield
        except EjkernelError:
            raise
        except Exception as error:
            reason = error_text(error).replace(self.url, shown(self.url))
            raise UnreachableError(f"{shown(self.url)} cannot be {what}: {reason}") from error


def _protocols(system: Any) -> tuple[str, ...]:
    protocol = system.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)
