# SPDX-License-Identifier: Apache-2.0
"""The torture finds planted defects: one for each guarantee, and the program reports it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
from benchmarks.torture import __main__ as program
from benchmarks.torture import bombs, candidates, commands, fuzzing, part, searches, surroundings, threads
from benchmarks.torture.crashes import Plan, Writer
from benchmarks.torture.formats import formats
from benchmarks.torture.fuzzing import Judge, input_of, runs_of
from benchmarks.torture.part import Budget, Tally

from ejkernel.ops import ConfigSelectorChain, PersistentCache
from ejkernel.ops.autotuner.measure.measurement import Measurement
from ejkernel.ops.autotuner.store import saving
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, Outcome
from ejkernel.ops.config import persistent
from ejkernel.ops.config.cache import ConfigCache
from ejkernel.ops.errors import TuningError
from ejkernel.ops.utils.storage import serialize

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def loud_again(monkeypatch):
    """Silence warnings during deliberate damage, and restore them."""
    monkeypatch.delenv("EJKERNEL_OPS_STAMP", raising=False)
    with warnings.catch_warnings():
        yield


@pytest.fixture
def budget(tmp_path):
    def made(inputs, **changes):
        return Budget(**{"seconds": 60.0, "seed": 0, "folder": tmp_path, "inputs": inputs, **changes})

    return made


@pytest.fixture
def tally():
    return Tally("part")


def kinds(tally):
    return {(found.kind, found.where) for found in tally.findings}


# --- content of files ---


def test_the_torture_finds_an_unchecked_digest(budget, tally, monkeypatch):
    monkeypatch.setattr(serialize, "_is_whole", lambda raw, form: True)
    fuzzing.damage(budget(2000, only=("entry",)), tally)
    assert ("wrong", "entry") in kinds(tally)


def test_the_torture_finds_undeclared_errors_and_hanging_readers(budget, tally, monkeypatch):
    monkeypatch.setattr(part, "PATIENCE", 0.01)
    Judge.judge(judge(tally, lambda raw: raw[0]), 7, b"", sealed=False)
    Judge.judge(judge(tally, lambda raw: threading.Event().wait()), 8, b"", sealed=False)
    assert [(found.kind, found.number) for found in tally.findings] == [("uncaught", 7), ("hang", 8)]
    assert tally.data()["hang"] == 1


def judge(tally, read):
    """Return a judge of a reader that may raise nothing."""
    made = fuzzing.Format(name="made", originals=(), read=read)
    return Judge(made, tally)


def test_the_torture_finds_illegal_forms(budget, tally, monkeypatch):
    monkeypatch.setattr("benchmarks.torture.formats.decoded", lambda entry, cfg_type: entry.config)
    monkeypatch.setattr("benchmarks.torture.formats._is_tile", _has_fields)
    fuzzing.mutation(budget(300, only=("entry",)), tally)
    assert kinds(tally) == {("wrong", "entry")}


def _has_fields(config):
    return isinstance(config, dict) and config.keys() == {"rows", "order"}


def test_the_same_seed_and_number_make_the_same_input(budget):
    found = formats(budget(1).folder)
    others = [raw for format in found.values() for raw in format.originals]
    for name, format in found.items():
        again = [input_of(format, budget(1).random(name, 5), others) for _ in range(2)]
        assert again[0] == again[1]
    several = {input_of(found["entry"], budget(1).random("entry", number), others)[0] for number in range(50)}
    assert len(several) > 45
    assert budget(1, seed=1).random("a").random() != budget(1).random("a").random()


def test_the_torture_finds_nothing_without_a_planted_defect(budget, tally):
    fuzzing.damage(budget(20), tally)
    bombs.bombs(budget(100, only=("entry",), folder=budget(1).folder / "bombs"), tally)
    assert tally.findings == []
    assert tally.counts["entry"] > 40


def test_without_atheris_guided_fuzzing_is_reported_as_left_out(budget, tally, monkeypatch):
    monkeypatch.setattr(fuzzing, "find_spec", lambda name: None)
    fuzzing.guided(budget(1), tally)
    assert "atheris is not installed" in tally.left_out[0]
    assert runs_of("#2\tINITED cov: 3\n#4096\tpulse  cov: 5\nDone 5000 runs in 3 second(s)\n") == 5000


# --- environment of files ---


def not_atomic(file, text, *, durable=True, root=None):
    """Write a file in place, and in two pieces."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb", buffering=0) as stream:
        for piece in (text.encode()[:10], text.encode()[10:]):
            if stream.write(piece) != len(piece):
                raise OSError("the disk is full")


def test_the_torture_finds_files_not_replaced_atomically(budget, tally, monkeypatch):
    monkeypatch.setattr(persistent, "write_file", not_atomic)
    surroundings.disks(budget(8), tally)
    assert ("lost", "writes beyond a limit of the file size") in kinds(tally)


def test_the_torture_finds_results_that_a_full_disk_loses(budget, tally, monkeypatch):
    monkeypatch.setattr(persistent, "keep_elsewhere", lambda folder, parts, text: folder)
    surroundings.disks(budget(20), tally)
    if not tally.left_out:  # without the right to mount a small disk
        assert ("lost", "writes to a full disk") in kinds(tally)


def test_the_torture_finds_a_read_that_waits_for_a_pipe(budget, tally, monkeypatch):
    monkeypatch.setattr(part, "PATIENCE", 0.2)
    monkeypatch.setattr("ejkernel.ops.config._files._READ", os.O_RDONLY)
    surroundings.places(budget(None, only=("a pipe as entry",)), tally)
    assert ("hang", "a pipe as entry") in kinds(tally)


def test_the_torture_finds_an_order_that_trusts_the_clock(budget, tally, monkeypatch):
    monkeypatch.setattr("ejkernel.ops.autotuner.store.measurements._after", lambda stamp: "20000101T000000")
    surroundings.clocks(budget(3), tally)
    assert ("wrong", "clock") in kinds(tally)


def test_the_torture_finds_a_lost_acknowledged_put(tmp_path):
    plan = Plan(folder=str(tmp_path), seed=0, processes=1, operations=100, every=10)
    writer = Writer(plan, 0, {})
    for number in range(100):
        writer.do(number)
    own, last = max(writer._acknowledged.items(), key=lambda item: item[1])
    found = writer._cache.get("gpu", "own@v0", f"0-{own}")
    writer.check(own, found, 100)
    with pytest.raises(AssertionError, match="lost: put"):
        writer.check(own, None, 100)
    with pytest.raises(AssertionError, match=f"lost: .*after {last} was stored"):
        writer.check(own, found | older(found), 100)
    with pytest.raises(AssertionError, match="wrong"):
        writer.check(own, found | {"padding": "y" * len(found["padding"]) + "y"}, 100)


def older(found):
    """Return the previous entry under the same key."""
    from benchmarks.torture.crashes import _OWN, _content

    return _content(found["writer"], found["number"] - _OWN, len(found["padding"]))


@pytest.mark.parametrize(
    "defect",
    [
        "folder.remove_judged = lambda root, file, judged: file.unlink(missing_ok=True) or True",
        "exchange.FolderPlace._check = lambda place, members, rivals: None",
    ],
)
def test_the_torture_finds_a_command_that_removes_or_replaces_unjudged_files(tmp_path, defect):
    """Runs in a new process, which forks before JAX has threads."""
    program = (
        "import json, sys, time\n"
        "from benchmarks.torture.upkeep import Plan, torture\n"
        "from ejkernel.cli import folder\n"
        "from ejkernel.ops.config.shared import exchange\n"
        f"{defect}\n"
        "print(json.dumps(torture(Plan(folder=sys.argv[1], seed=0, seconds=30.0))))\n"
    )
    words = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, env=os.environ, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["problems"][0].startswith("lost: ")


def test_the_torture_finds_tracebacks_and_terminal_codes_of_a_command(budget, tally, monkeypatch):
    monkeypatch.setattr(commands, "main", lambda words: 1 // (len(words) - 2))
    commands.commands(budget(40), tally)
    assert kinds(tally) == {("uncaught", "command line")}
    monkeypatch.setattr(commands, "main", lambda words: print("\x1b[2J") or 0)
    with pytest.raises(AssertionError, match="it prints"):
        commands.status_of(["show"])


def test_the_torture_finds_an_ignored_overlay(budget, tally, monkeypatch):
    monkeypatch.setattr(threads, "overlay_cache", lambda entries: contextlib.nullcontext())
    threads.threads(budget(160), tally)
    assert kinds(tally) == {("wrong", "threads")}


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc")
def test_the_torture_finds_and_ends_a_process_left_behind(budget, tally, monkeypatch):
    monkeypatch.setattr(candidates, "_LEAVE", 0.0)
    # By the shell alone: while a process becomes another program, its environment cannot be read.
    ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    left = subprocess.Popen(["sh", "-c", "echo; read line"], env={candidates._MARK: "here"}, **ends)
    left.stdout.readline()  # nor before it runs
    candidates._check(budget(1).folder / "none", "here", 3, tally)
    assert [(found.kind, found.number) for found in tally.findings] == [("hang", 3)]
    left.communicate()
    assert left.returncode < 0


def save_unmeasured(folder, number):
    """Have a chain save the result of a search that ended before the winner was measured."""
    inv, config = searches.call(number), searches.Candidate("", 2)
    heuristic = Outcome(config=searches.HEURISTIC, status="measured", measurement=Measurement(samples=(2.0,)))
    outcomes = (heuristic, Outcome(config=config, status="skipped"))
    data = AutotuneData(inv=inv, config=config, outcomes=outcomes, seconds=1.0, checked=("outputs",))

    class Tuner:
        def tune(self, inv, kernel, **_):
            return data

    chain = ConfigSelectorChain(ConfigCache(), PersistentCache(folder, shipped=False), tuner=Tuner())
    with contextlib.suppress(TuningError):
        chain.search(inv, searches.INTERRUPTED)


def test_the_torture_finds_an_unmeasured_winner_in_the_cache(tmp_path, tally, monkeypatch):
    save_unmeasured(tmp_path, 0)
    searches.check(tmp_path, 0, None, tally)
    assert (tally.findings, tally.counts["entries that were saved"]) == ([], 0)  # the library saves no such winner
    monkeypatch.setattr(saving, "why_not_saved", lambda *_, **__: "")
    save_unmeasured(tmp_path, 0)
    searches.check(tmp_path, 0, None, tally)
    assert kinds(tally) == {("wrong", "searches")}
    whats = " ".join(found.what for found in tally.findings)
    assert "it was not measured" in whats
    assert "it was not confirmed against the heuristic" in whats


# --- the program ---


def test_findings_are_printed_with_the_command_that_repeats_them_and_saved(monkeypatch, capsys, tmp_path):
    def broken(budget, tally):
        tally.counts["tries"] += 5
        tally.found("lost", "it's gone", 3, "it is not there")

    monkeypatch.setattr(program, "PARTS", {"damage": broken, "clocks": lambda budget, tally: None})
    figures = tmp_path / "figures.json"
    for _ in range(2):
        assert program.main(["--seed", "4", "--out", str(figures)]) == 1
    out = capsys.readouterr().out
    assert "LOST it's gone 3: it is not there" in out
    assert """python -m benchmarks.torture damage --seed 4 --only 'it'"'"'s gone' --first 3 --inputs 1""" in out
    totals = json.loads(figures.read_text())["totals"]
    assert (totals["damage"]["counts"], totals["damage"]["lost"], totals["clocks"]["counts"]) == ({"tries": 10}, 2, {})
    assert program.main(["clocks"]) == 0
    with pytest.raises(SystemExit):
        program.main(["none"])


# --- the documents ---

ROOT = Path(__file__).parents[1]


def rows(document):
    """Return the rows of the tables in a document, by their first cells that name a part or a kind."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"(?m)^\| .*`.*$", text)]


def totals():
    return json.loads((ROOT / "benchmarks/results/torture.json").read_text())["totals"]


def test_each_guarantee_has_the_figures_of_its_part():
    found = rows("docs/guarantees.md")
    assert {name.strip("`") for _, name, *_ in found} == set(program.PARTS)
    for _, name, tried, *kinds in found:
        total = totals()[name.strip("`")]
        assert tried == ", ".join(f"{count:,} {what}" for what, count in sorted(shown(total["counts"]).items()))
        assert kinds == [str(total[kind]) for kind in ("lost", "hang", "uncaught", "wrong")]


def shown(counts):
    """Return the counts of a part, of kinds of content as one."""
    return {"inputs": sum(counts.values())} if "entry" in counts else counts


def test_each_kind_of_content_has_its_number_of_attempts(tmp_path):
    for kind, *figures in rows("SECURITY.md"):
        parts = ("damage", "mutation", "guided", "bombs")
        counts = [totals()[part]["counts"].get(kind.strip("`"), 0) for part in parts]
        assert figures == [f"{count:,}" for count in counts]
    assert {kind.strip("`") for kind, *_ in rows("SECURITY.md")} == set(formats(tmp_path))


def test_the_guarantees_name_existing_tests():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/guarantees.md").read_text(encoding="utf-8")))
    defined = {
        name for file in (ROOT / "tests").rglob("*.py") for name in re.findall(r"(?m)^def (test_\w+)", file.read_text())
    }
    assert len(named) > 5
    assert named <= defined


def test_a_finding_is_repeated_by_its_number(budget, tally, monkeypatch):
    monkeypatch.setattr(serialize, "_is_whole", lambda raw, form: True)
    fuzzing.damage(budget(None, only=("result",)), tally)
    found, again = tally.findings[3], Tally("part")
    fuzzing.damage(budget(1, only=("result",), first=found.number, folder=budget(1).folder / "again"), again)
    assert again.findings == [found]
    assert again.counts["result"] == 1


def test_the_short_form_has_a_little_of_every_part():
    assert set(program.SHORT) == set(program.PARTS)
