# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.memory_tpu_compiled RESULTS...`: the compiler's figures as estimates of common calls.

The results are files of `benchmarks.memory_tpu`, `memory_splash_tpu` and `memory_tpu_calls`. Kernels of one form take
the same vector memory, beyond what follows from their shapes. The table of the package has this rest for each form, the
highest if several kernels of a form were compiled. Prints how far the kernels of a form differ.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks import attention_tpu, memory_tpu_fit

_TABLE = Path(__file__).parents[1] / "src/ejkernel/data/compiled/attention_tpu.json"
_WHAT = "bytes of intermediate values in kernels compiled by Google's compiler; nothing ran on a TPU"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    found: dict[str, list[memory_tpu_fit.Kernel]] = {}
    for file in parser.parse_args(arguments).results:
        for one in memory_tpu_fit.kernels(json.loads(file.read_text())["results"]):
            found.setdefault(one.parts.form, []).append(one)
    table = {form: max(one.used - one.parts.known for one in several) for form, several in sorted(found.items())}
    above = [(one.parts.known + table[form]) / one.used for form, several in found.items() for one in several]
    print(f"{len(above)} kernels of {len(table)} forms; the highest of a form is up to {max(above) - 1:.1%} above")
    versions = attention_tpu.versions() | {"device": "compiled"}
    _TABLE.write_text(f"{json.dumps({'what': _WHAT, 'versions': versions, 'bytes': table}, indent=1)}\n")


if __name__ == "__main__":
    main()
