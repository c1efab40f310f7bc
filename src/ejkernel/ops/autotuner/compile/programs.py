# SPDX-License-Identifier: Apache-2.0
"""The files of a bundle's programs, which a second attempt at an interrupted bundle uses again.

The files of a program, its code and its facts, have the name of its digest, that of the lowered program. A second
attempt lowers every candidate again, and compiles those whose digest is not there yet. So a kernel that was changed in
between is compiled as it is now. Candidates that failed are tried again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

from ejkernel.ops.autotuner.compile.threads import Done
from ejkernel.ops.autotuner.trials.candidates import CodeFile, Program
from ejkernel.ops.config._files import UnusableError, read_file
from ejkernel.ops.config._writing import exclusive, write_file
from ejkernel.ops.errors import CandidateError, ConfigError, SerializationError
from ejkernel.ops.utils.error_text import printable
from ejkernel.ops.utils.storage.serialize import describe, from_plain, read_object, sealed_json

logger = logging.getLogger(__name__)

_SCHEMA: Final = 2
_LARGEST: Final = 1 << 16  # bytes of a file of facts
_MOST_ARRAYS: Final = 1 << 16  # that a program takes or returns
_FACTS, _CODE = ".facts.json", ".bin"
_FILE: Final = re.compile(r"([0-9a-f]{64})(\.facts\.json|\.bin)|\..*\.tmp")  # the last are those of a killed writer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """The facts of a program in a bundle, and the versions of its compilers."""

    schema: int
    compilers: dict[str, str]
    code: str  # digest of its file
    compile_seconds: float
    program: Program


def read_program(folder: Path, digest: str) -> _Facts:
    """Return the facts of a program in a bundle, after checking its code.

    Raises:
        CandidateError: The program is missing, or a file of it is damaged.
    """
    file = folder / f"{digest}{_FACTS}"
    try:
        facts = from_plain(read_object(read_file(file, _LARGEST) or b"", _SCHEMA, "the facts of a program"), _Facts)
    except (UnusableError, SerializationError) as error:
        raise CandidateError(f"its program {file.name} cannot be used: {error}") from error
    program = facts.program
    arrays = (program.inputs, program.outputs)
    if program.digest != digest or not 0 <= min(arrays) <= max(arrays) <= _MOST_ARRAYS:
        raise CandidateError(f"its program {file.name} is another one, or takes or returns {describe(arrays)} arrays")
    code = CodeFile(folder / f"{digest}{_CODE}", facts.code)
    code.read()
    return dataclasses.replace(facts, program=dataclasses.replace(program, code=code))


class Programs:
    """The programs in the folder of a bundle that is being compiled.

    Args:
        folder: The folder.
        compilers: The device and the versions of what compiles; programs of others are compiled again.
    """

    def __init__(self, folder: Path, compilers: Mapping[str, str]) -> None:
        self._folder = folder
        self._compilers = dict(compilers)
        self._found = dict(self._earlier())
        if self._found:
            logger.info("%d programs of an earlier attempt are used again: %s", len(self._found), printable(folder))

    @classmethod
    @contextlib.contextmanager
    def opened(cls, folder: Path, compilers: Mapping[str, str]) -> Iterator[Programs]:
        """Hold the folder for a `with` block: another process would remove files of this one at its end.

        Raises:
            ConfigError: The folder has other files than those of an interrupted bundle.
            OSError: The folder is not writable, or another process compiles into it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if any(_FILE.fullmatch(file.name) is None for file in folder.iterdir()):
            raise ConfigError(
                f"the bundle's folder must be empty, or that of an interrupted bundle, but {folder} is not; remove it "
                "or name another."
            )
        with exclusive(folder):
            yield cls(folder, compilers)

    @property
    def known(self) -> frozenset[str]:
        """The digests of the programs that need not be compiled."""
        return frozenset(self._found)

    def kept(self, done: Done[Program]) -> Done[Program]:
        """Return a finished job with its program in a file; of an earlier attempt, if it was not compiled again.

        Raises:
            OSError: The file cannot be written.
        """
        program = done.result
        if program is None or program.why_left or isinstance(program.code, CodeFile):
            return done
        if (found := self._found.get(program.digest)) is not None:  # two codes of one program may differ
            seconds = done.seconds if program.code is not None else found.seconds
            return dataclasses.replace(done, result=found.result, seconds=seconds)
        assert program.code is not None  # only known programs have none
        found = dataclasses.replace(done, result=self._written(program, program.code, done.seconds))
        self._found[program.digest] = found
        return found

    def end(self, digests: Collection[str | None]) -> None:
        """Remove the programs that the manifest does not name."""
        for file in self._folder.iterdir():
            if (match := _FILE.fullmatch(file.name)) is not None and match[1] and match[1] not in digests:
                file.unlink()

    def _written(self, program: Program, code: bytes, seconds: float) -> Program:
        file = CodeFile.written(self._folder / f"{program.digest}{_CODE}", code)
        facts = _Facts(
            schema=_SCHEMA,
            compilers=self._compilers,
            code=file.sha256,
            compile_seconds=seconds,
            program=dataclasses.replace(program, code=None),
        )
        # after the code, so that a program with facts is whole
        write_file(self._folder / f"{program.digest}{_FACTS}", sealed_json(facts))
        return dataclasses.replace(program, code=file)

    def _earlier(self) -> Iterator[tuple[str, Done[Program]]]:
        """Yield the digests and programs of an earlier attempt by the same compilers."""
        for file in self._folder.glob(f"*{_FACTS}"):
            digest = file.name.removesuffix(_FACTS)
            try:
                facts = read_program(self._folder, digest)
            except CandidateError as error:
                logger.warning("a program is compiled again: %s", printable(error))
                continue
            if facts.compilers == self._compilers:
                yield digest, Done(0, facts.program, None, facts.compile_seconds)
