# SPDX-License-Identifier: Apache-2.0
"""Standard output and standard error, brought back."""

from __future__ import annotations

import inspect
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ejkernel.ops.autotuner.process.outputs import Outputs

SCRIPT = """
import os, sys
sys.path.insert(0, {folder!r})  # without the package, which takes seconds to import
from outputs import Outputs

outputs = Outputs()
{act}
harm = outputs.mend(is_idle=True)
print("printed")
print("to standard error", file=sys.stderr)
os.write(1, b"written")
sys.stdout.flush()
sys.exit(harm)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "harm"),
    [
        ("pass", 0),
        ("os.close(1)", 1),
        ("os.close(2)", 1),
        ("os.closerange(0, 3)", 1),
        ("sys.stdout.close(); sys.stderr.close()", 1),
        ("sys.stdout = sys.stderr = None", 1),
        ("sys.stdout = object()", 1),
        ("import io; sys.stdout = io.StringIO()", 0),
        ("os.dup2(os.open(os.devnull, os.O_WRONLY), 1)", 0),
    ],
)
def test_closed_or_redirected_streams_work_afterwards(act, harm):
    script = SCRIPT.format(act=act, folder=str(Path(inspect.getfile(Outputs)).parent))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (harm, "to standard error\n")
    assert sorted(done.stdout.split()) == ["printed", "written"]


def test_changes_that_others_may_have_made_stay(monkeypatch):
    before, other = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", before)
    outputs = Outputs()
    sys.stdout = other
    assert outputs.mend() == 0
    assert sys.stdout is other
    sys.stdout.close()
    assert outputs.mend() == 1
    assert sys.stdout is before
    outputs.close()


def test_replacements_stay_while_a_candidate_runs(monkeypatch):
    outputs = Outputs()
    other = io.StringIO()
    monkeypatch.setattr(sys, "stdout", other)
    assert outputs.mend() == 0
    assert sys.stdout is other
    assert os.fstat(1)
    outputs.close()
