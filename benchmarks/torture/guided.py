# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.torture.guided FORMAT FOLDER [OPTION OF LIBFUZZER...]`: one reader, guided by its coverage."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ejkernel.ops", "ejkernel.cli"]):
    from benchmarks.torture.formats import body_of, formats
    from benchmarks.torture.fuzzing import Judge, input_of
    from benchmarks.torture.material import quiet
    from benchmarks.torture.part import Tally

_PLAIN, _SEALED = b"\0", b"\1"  # first byte of an input: whether to seal it


def main(argv: list[str]) -> None:
    """Fuzz until libFuzzer stops; a finding ends the process."""
    name, folder, *options = argv
    quiet()
    place = Path(folder)
    format = formats(place)[name]
    tally = Tally(name)
    judge = Judge(format, tally)

    def one(data: bytes) -> None:
        sealed = data[:1] == _SEALED and format.seal is not None
        raw = format.seal(data[1:]) if sealed and format.seal is not None else data[1:]
        judge.judge(0, raw, sealed=sealed)
        if tally.findings:
            raise RuntimeError(str(tally.findings[0]))

    def other(data: bytes, size: int, seed: int) -> bytes:
        source = random.Random(seed)
        if source.random() < 0.5:
            return bytes(atheris.Mutate(data, size))
        raw, sealed = input_of(format, source, format.originals)
        return (_SEALED + body_of(raw) if sealed else _PLAIN + raw)[:size]

    corpus = place / "corpus"
    corpus.mkdir()
    for number, raw in enumerate(format.originals):
        (corpus / f"{number}-whole").write_bytes(_PLAIN + raw)
        (corpus / f"{number}-body").write_bytes(_SEALED + body_of(raw))
    limits = [f"-max_len={4 * max(map(len, format.originals))}", "-timeout=60", f"-artifact_prefix={place}/"]
    atheris.Setup(["torture", *limits, *options, str(corpus)], one, custom_mutator=other)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
