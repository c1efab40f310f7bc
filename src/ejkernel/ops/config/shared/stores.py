# SPDX-License-Identifier: Apache-2.0
"""The remote store of a shared cache, accessed through `fsspec` (an extra dependency).

A store must only list, read, write and remove whole objects. A pack's name is the digest of its content, so writers
never write different content under one name and need not read before they write.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ejkernel import settings
from ejkernel.ops.config._writing import write_file
from ejkernel.ops.config.shared import packs
from ejkernel.ops.errors import ConfigError, EjkernelError
from ejkernel.ops.utils.error_text import error_text, printable

MOST: Final = 10_000  # packs in a store that ordinary programs read
REMEDY: Final = "run `ejkernel cache prune URL` to merge them"
# Other fsspec protocols may unpack archives, run templates or mount file systems named by the content.
PROTOCOLS: Final = ("file", "local", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "http", "https")
_PACKAGES: Final = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "adlfs"),
    **dict.fromkeys(("http", "https"), "aiohttp"),
}
_USER: Final = re.compile(r"//[^/@]*@")


class UnreachableError(EjkernelError, OSError):
    """A store cannot be read or written at the moment; the message has the reason."""


def shown(url: str) -> str:
    """Return a URL for messages: printable, without user names, passwords and signatures."""
    return printable(_USER.sub("//", url.partition("?")[0]))


def check_protocols(url: str) -> None:
    """Check that the protocol of a URL is in `PROTOCOLS` or in `EJKERNEL_CACHE_PROTOCOLS`.

    In a chain such as `simplecache::s3://bucket`, the user must have allowed each protocol before the last.

    Raises:
        ConfigError: The URL has another protocol.
    """
    own = settings.current().cache_protocols
    *outer, inner = (part.partition("://")[0].lower() for part in url.split("::"))  # fsspec splits the same way
    refused = [name for name in outer if name not in own] or [inner] * (inner not in (*PROTOCOLS, *own))
    if refused:
        name = printable(refused[0].partition("?")[0])
        raise ConfigError(
            f"the shared cache {shown(url)} {'is a chain of URLs with' if outer else 'has'} the protocol {name!r}; "
            f"allowed are {', '.join((*PROTOCOLS, *own))}, without chains. If it is safe to let {name!r} process the "
            f"content of the store, set EJKERNEL_CACHE_PROTOCOLS={name}."
        )


class Store:
    """The packs below a URL.

    Args:
        url: A URL for `fsspec`, such as `s3://bucket/prefix`, `gs://...`, `file:///...` or `memory://...`, with a
            protocol of `PROTOCOLS` or `EJKERNEL_CACHE_PROTOCOLS`. Credentials come from the protocol's own settings
            and environment variables.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._opened: tuple[int, Any, str] | None = None  # the process that opened it, the file system, and the root
        self._empty: frozenset[str] = frozenset()  # objects of zero bytes at the last listing

    def __repr__(self) -> str:
        return f"Store({shown(self.url)!r})"

    def sizes(self, most: float = MOST) -> dict[str, int]:
        """Return the names and sizes of the packs; a location that does not exist has none.

        Raises:
            UnreachableError: The store cannot be listed, or holds more than `most` packs.
        """
        with self._errors("listed"):
            system, root = self._system()
            system.invalidate_cache()  # a cached listing would lack the packs that others have added
            try:
                found = system.ls(root, detail=True)
            except FileNotFoundError:
                found, self.is_there = [], False
            else:  # listing a file returns the file itself
                self.is_there = [item["name"] for item in found] != [root]
        sizes = {posixpath.basename(item["name"]): item.get("size") for item in found if item.get("type") == "file"}
        ours = {name: size for name, size in sizes.items() if packs.is_name(name) and type(size) is int}
        if len(ours) > most:
            raise UnreachableError(f"{shown(self.url)} holds more than {most} packs; {REMEDY}.")
        self._empty = frozenset(name for name, size in ours.items() if size == 0)
        return ours

    def read(self, name: str) -> bytes | None:
        """Read and check a pack; `None` if it is gone.

        Raises:
            UnusableError: The object is not the pack with this name, or is too large.
            UnreachableError: The object cannot be read.
        """
        raw = self.raw(name)
        if raw is not None:
            packs.check(name, raw)
        return raw

    def raw(self, name: str) -> bytes | None:
        """Return the unchecked bytes of a pack, or `None` if it is gone.

        Raises:
            DamagedError: The object is larger than any pack.
            UnreachableError: The object cannot be read.
        """
        if name in self._empty:  # S3 rejects a range of an empty object
            return b""
        with self._errors("read"):
            system, root = self._system()
            try:
                raw: bytes = system.cat_file(posixpath.join(root, name), start=0, end=packs.LARGEST + 1)
            except FileNotFoundError:  # merged after the listing
                return None
        if len(raw) > packs.LARGEST:
            raise packs.DamagedError(f"it has more than {packs.LARGEST} bytes")
        return raw

    def write(self, name: str, raw: bytes) -> None:
        """Write a pack and return when the store has accepted it.

        Raises:
            UnreachableError: The pack cannot be written.
        """
        self._empty -= {name}
        with self._errors("written"):
            system, root = self._system()
            path = posixpath.join(root, name)
            names = system.protocol
            if "file" in ([names] if isinstance(names, str) else names):  # fsspec would write in place, not atomically
                write_file(Path(path), raw)
                return
            system.pipe_file(path, raw)
            system.invalidate_cache()
            size = system.info(path).get("size")
        if size != len(raw):
            raise UnreachableError(f"{shown(self.url)} stored {size} of {len(raw)} bytes of {name}.")

    def remove(self, name: str) -> None:
        """Remove a pack if it exists.

        Raises:
            UnreachableError: The pack cannot be removed.
        """
        with self._errors("changed"):
            system, root = self._system()
            with contextlib.suppress(FileNotFoundError):
                system.rm_file(posixpath.join(root, name))

    def _system(self) -> tuple[Any, str]:
        # In a forked process, the file systems of buckets refuse to work.
        if self._opened is None or self._opened[0] != os.getpid():
            check_protocols(self.url)
            try:
                from fsspec.core import url_to_fs
            except ImportError as error:
                raise self._lacks(" ".join(filter(None, ("fsspec", self._package)))) from error
            try:
                system, root = url_to_fs(self.url)
            except ImportError as error:
                if self._package is None:
                    raise
                raise self._lacks(self._package) from error
            self._opened = os.getpid(), system, str(root)
        return self._opened[1:]

    @property
    def _package(self) -> str | None:
        """The package that fsspec needs for the protocol; `None` if it needs none, or none is known."""
        return _PACKAGES.get(self.url.rpartition("::")[2].partition("://")[0].lower())

    def _lacks(self, packages: str) -> ConfigError:
        return ConfigError(f"{shown(self.url)} needs {packages}: pip install {packages}")

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Raise an `UnreachableError` for any exception of the store's library."""
        try:
            yield
        except EjkernelError:
            raise
        except Exception as error:
            reason = error_text(error).replace(self.url, shown(self.url))
            raise UnreachableError(f"{shown(self.url)} cannot be {what}: {reason}") from error
