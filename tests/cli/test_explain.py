# SPDX-License-Identifier: Apache-2.0
"""`ejkernel explain` and `ejkernel list`, and the layout of tables on a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import jax.numpy as jnp
import pytest
from tests.ops.sealing import lines_with_digest

from ejkernel.cli import explain, main, report, show
from ejkernel.kernels.rms_norm.xla import XlaParams
from ejkernel.modules import RmsNormConfig
from ejkernel.modules import flash_attention as flash
from ejkernel.ops import ConfigSelectorChain, Invocation, PersistentCache
from ejkernel.ops.autotuner.trials.status import SearchProgress, SearchState
from ejkernel.ops.config.cache import ORDER
from ejkernel.ops.config.selection import Resolution
from ejkernel.ops.execution import explain as explanations
from ejkernel.ops.execution.explain import Explanation
from ejkernel.ops.utils.formatting import terminal_width

PROGRAM = """
import jax
import jax.numpy as jnp
from ejkernel.ops import tune


@tune(space={"rows_of_first": [1, 2], "rows_of_second": [1, 2]})
def explained(x, *, rows_of_first=1, rows_of_second=1):
    return x * 2


def step():
    print("a program may print")
    return jax.value_and_grad(lambda x: explained(x).sum()), (jax.ShapeDtypeStruct((4, 4), jnp.float32),)


def nothing():
    return jnp.sin, (jnp.ones(3),)
"""

NORMED = """
import jax, jax.numpy as jnp
from ejkernel.modules import rms_norm


def step():
    return rms_norm, (jax.ShapeDtypeStruct((8, 128), jnp.float32),)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a program; its forward is tuned."""
    (tmp_path / "explained_program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    import explained_program as program

    inv = Invocation(kernel=program.explained, args=(jnp.ones((4, 4)),))
    ConfigSelectorChain(persistent=PersistentCache(tmp_path / "cache")).search(inv, program.explained)
    yield tmp_path
    del sys.modules["explained_program"]


def explained(state, source="persistent"):
    search = SearchProgress(SearchState(state), 3, 3)
    found = Resolution(1, source, None)
    return Explanation(
        op_id_v="double@v0", key=None, key_note="", label=None, label_note="", tiers=(), resolution=found, search=search
    )


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        ([explained("undecided")], "1 of 1 call with a saved configuration (1 undecided); `ejkernel tune p:f"),
        (
            [explained("complete"), explained("undecided"), explained("partial", "heuristic")],
            "2 of 3 calls with a saved configuration (1 undecided); `ejkernel tune p:f` measures the other; "
            "`ejkernel tune p:f --undecided` measures undecided calls again",
        ),
    ],
)
def test_an_undecided_call_is_counted_and_named(calls, says):
    assert explain.counts_in_words(calls, "p:f").startswith(says)


def run(capsys, *arguments):
    status = main(arguments)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["EJKERNEL_ON_MISS", "EJKERNEL_STALE", "EJKERNEL_OPS_STAMP"])
def test_a_bad_variable_is_reported_before_the_program_begins(folder, capsys, monkeypatch, name):
    monkeypatch.setenv(name, "banana")
    status, out, err = run(capsys, "explain", "explained_program:step", "--cache", "cache")
    assert (status, out) == (1, "")
    assert err.startswith(f"ejkernel: error: {name} must ")


def test_explain_says_why_each_call_has_its_configuration(folder, capsys):
    status, out, err = run(capsys, "explain", "explained_program:step", "--cache", "cache")
    assert status == 0
    forward, backward = out.split("\n\n")
    assert forward.startswith("explained@v0  f32[4,4]\n  key ")
    assert forward.splitlines()[2] == "  no answer  override, overlay, memory"
    assert forward.splitlines()[-1].endswith(", from persistent")
    assert backward.startswith("explained.bwd@v0")
    assert "\n  no answer  override, overlay, memory, persistent, shipped, autotune, sister\n  forward    " in backward
    assert backward.splitlines()[-1].endswith(", from forward")
    assert "a program may print" in err
    again = "ejkernel tune explained_program:step --cache cache"
    assert f"1 of 2 calls with a saved configuration; `{again}` measures the other" in err


def test_explain_selects_calls_as_show_does(folder, capsys):
    whole = run(capsys, "explain", "explained_program:step", "--cache", "cache")[1]
    _, backward = whole.removesuffix("\n").split("\n\n")
    key = re.search(r"^  key +(\w+) on", backward, re.MULTILINE)[1]
    selected = {"expl": whole, "explained.bwd": f"{backward}\n", f"explained.bwd:{key[:12]}": f"{backward}\n"}
    for prefix, shown in selected.items():
        assert run(capsys, "explain", "explained_program:step", prefix, "--cache", "cache")[1] == shown
    status, out, err = run(capsys, "explain", "explained_program:step", "explaned", "--cache", "cache")
    assert (status, out) == (1, "")
    assert "explained_program:step has no call whose key or operation starts with 'explaned'" in err
    assert "explained" in err.partition("explaned'")[2]
    assert run(capsys, "explain", "--missed", "explained", "--cache", "cache")[0] == 0


def test_a_verbose_explanation_has_a_line_for_every_tier(folder, capsys):
    forward, backward = run(capsys, "explain", "explained_program:step", "--cache", "cache", "-v")[1].split("\n\n")
    assert "  override   no cfg= was given" in forward
    assert "  persistent no entry" in backward
    assert "no answer" not in forward + backward
    for text in (forward, backward):
        assert [tier.name for tier in ORDER] == [line.split()[0] for line in text.splitlines()[2 : 2 + len(ORDER)]]
    assert "  shared     not asked: only with a URL in EJKERNEL_CACHE_LAYERS\n" in forward


def test_the_help_names_every_tier(capsys):
    assert main(["explain", "--help"]) == 0
    text = capsys.readouterr().out
    assert [tier.name for tier in ORDER if tier.name not in text] == []


def test_explain_prints_no_command_for_candidates_that_were_not_copied(folder, capsys):
    for log in (folder / "cache").rglob("*.jsonl"):
        log.unlink()
    forward = run(capsys, "explain", "explained_program:step", "--cache", "cache")[1].split("\n\n")[0]
    assert "candidates not here: the configuration was copied without its search" in " ".join(forward.split())


@pytest.mark.filterwarnings("ignore:ignoring .*schema 2:ejkernel.ops.CacheWarning")
def test_explain_says_why_the_log_of_a_search_is_unusable(folder, capsys):
    for log in (folder / "cache").rglob("*.jsonl"):
        log.write_text(lines_with_digest(log.read_text().replace('{"schema":3,', '{"schema":2,')))
    _, out, _ = run(capsys, "explain", "explained_program:step", "--cache", "cache")
    text = " ".join(out.split("\n\n")[0].split())
    assert "candidates unknown: the log " in text
    assert " cannot be used: it was written by an older ejkernel: schema 2, not 3" in text
    assert "copied without its search" not in text


def test_explain_as_json_has_every_tier(folder, capsys):
    status, out, _ = run(capsys, "explain", "./explained_program.py:step", "--cache", "cache", "--json")
    forward, backward = json.loads(out)
    assert status == 0
    assert (forward["op"], forward["source"]) == ("explained@v0", "persistent")
    assert set(forward["config"]) == {"rows_of_first", "rows_of_second"}
    assert [tier["tier"] for tier in backward["tiers"]][-3:] == ["autotune", "sister", "forward"]


@pytest.mark.slow
def test_the_configuration_of_a_backward_that_its_forward_answered_is_the_one_it_runs_with(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    more = "\n\ndef training():\n    return jax.grad(lambda x: rms_norm(x).sum()), step()[1]\n"
    Path("normed_training.py").write_text(NORMED + more)

    def explanations():
        return json.loads(run(capsys, "explain", "normed_training:training", "--json")[1])

    forward, untuned = explanations()
    config = RmsNormConfig(implementation="xla", fwd=XlaParams(block_rows=8))
    PersistentCache().put(forward["device"], forward["op"], forward["key"], config)
    forward, backward = explanations()
    assert (forward["config"]["fwd"], backward["source"]) == ({"block_rows": 8}, "forward")
    assert backward["config"] == untuned["config"]


def test_explain_measures_and_saves_nothing(folder, capsys, monkeypatch):
    monkeypatch.setenv("EJKERNEL_NOTE_MISSES", "1")
    monkeypatch.setenv("EJKERNEL_ON_MISS", "tune")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(folder / "fresh"))
    status, out, _ = run(capsys, "explain", "explained_program:step")
    assert status == 0
    assert "  autotune   would measure the candidates" in out
    assert not (folder / "fresh").exists()


def test_a_program_that_calls_no_kernel_is_a_failure(folder, capsys):
    status, out, err = run(capsys, "explain", "explained_program:nothing", "--json", "--cache", "cache")
    assert (status, out) == (1, "[]\n")
    assert "the program of explained_program:nothing made no call of an operation" in err


def test_list_has_every_implementation_and_why_one_cannot_run_here(capsys):
    status, out, err = run(capsys, "list")
    rows = [line.split(None, 3) for line in out.splitlines()[1:]]
    assert status == 0
    found = {(row[0], row[1]) for row in rows}
    assert found >= {("flash_attention", "cudnn"), ("flash_attention", "xla"), ("rms_norm", "xla")}
    assert err.startswith("On ")
    listed = json.loads(run(capsys, "list", "--json")[1])["implementations"]
    for entry in listed:
        assert entry["runs_here"] == (entry["reason"] is None)
        if entry["implementation"] == "xla":
            assert entry["runs_here"]


def test_list_takes_the_start_of_an_operation(capsys):
    status, out, err = run(capsys, "list", "quantized_gr")
    names = {line.split()[0] for line in out.splitlines()[1:]}
    assert (status, names) == (0, {f"quantized_grouped_{name}" for name in ("activation", "matmul", "wgrad")})
    assert "token_log_probs" not in err
    _, out, err = run(capsys, "list", "token_log", "--json")
    names = {each["operation"] for each in json.loads(out)["implementations"]}
    assert names == {"linear_cross_entropy", "linear_cross_entropy_gradients"}
    published = json.loads(run(capsys, "list", "paged", "--target", "tpu_v6e", "--json")[1])["published"]
    assert {each["operation"] for each in published} == {"paged_attention"}


@pytest.mark.parametrize(
    ("name", "advice"), [("flash_atention", "; did you mean 'flash_attention'?"), ("zzz", "; the operations are flash")]
)
def test_list_of_an_unknown_operation_is_an_error_with_the_known_ones(capsys, name, advice):
    status, out, err = run(capsys, "list", name)
    assert (status, out) == (1, "")
    assert f"no operation starts with {name!r}{advice}" in err


def test_list_is_about_the_target_and_says_why_an_implementation_does_not_run_there(capsys):
    _, out, err = run(capsys, "list", "--target", "tpu_v6e")
    assert err.startswith("On tpu_v6e:\n")
    assert "token_log_probs runs as linear_cross_entropy" in err
    reason = r"^flash_attention +cudnn +no +needs an NVIDIA GPU, Ampere \(A100\) or later$"
    assert re.search(reason, out, re.M)
    assert re.search(r"^flash_attention +splash +yes", out, re.M)
    assert re.search(
        r"^flash_attention, splash: \d+ configurations published in tokamax \S+, 20\d\d-\d\d-\d\d$", out, re.M
    )
    published = json.loads(run(capsys, "list", "--target", "tpu_v6e", "--json")[1])["published"]
    assert {"grouped_matmul", "paged_attention"} <= {each["operation"] for each in published}
    assert callable(flash)


def test_a_program_is_explained_for_the_target(folder, capsys):
    status, out, err = run(capsys, "explain", "explained_program:step", "--target", "tpu_v6e")
    assert (status, "on tpu_v6e" in err) == (0, True)
    assert re.search(r"^  key +\w+ on tpu:tpu_v6_lite$", out, re.M)
    assert re.search(r"^  no answer +override, .*estimated$", out, re.M)
    assert run(capsys, "explain", "--missed", "--target", "tpu_v6e")[0] == 2


def test_other_implementations_are_listed_for_the_target(folder, capsys):
    Path("normed.py").write_text(NORMED)
    for options, says in (
        ([], r"do(es)? not run on this device; see `ejkernel list`$"),
        (["--target", "tpu_v6e"], r"do(es)? not run on tpu_v6e; see `ejkernel list --target tpu_v6e`$"),
    ):
        out = run(capsys, "explain", "normed:step", *options)[1]
        assert re.search(says, out.replace("\n" + " " * 12, " "), re.M)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--target", "nvidia_h200"], "got 'nvidia_h200': only Google's compiler for TPUs has a simulator"),
        (["--target", "tpu7x"], "got 'tpu7x': its simulator ends the process"),
        ([], "--estimate needs MODULE:FUNCTION or --shapes, and --target"),
        (["--target", "tpu_v6e", "--budget", "3"], "--budget cannot be used with --estimate, which measures nothing"),
        (["--target", "tpu_v6e", "--compile-only"], "run one after the other"),
    ],
)
def test_estimates_need_a_target_with_a_simulator(folder, capsys, options, says):
    status, _, err = run(capsys, "tune", "explained_program:step", "--estimate", *options)
    assert status != 0
    assert says in err


def test_list_includes_the_kernels_of_a_named_module(folder, capsys):
    status, out, _ = run(capsys, "list", "--import", "explained_program")
    assert status == 0
    assert ["explained@v0", "run", "yes"] in [line.split() for line in out.splitlines()]


# --- tables and terminals ---


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 80, 132])
@pytest.mark.parametrize(
    "command",
    [
        ["show", "--cache", "cache"],
        ["show", "--cache", "cache", "--log", "explained"],
        ["explain", "explained_program:step", "--cache", "cache"],
        ["tune", "--in-process", "explained_program:step", "--dry-run", "--cache", "cache"],
        ["list"],
    ],
    ids=lambda command: command[0] if isinstance(command, list) else None,
)
def test_tables_fit_the_terminal_and_cut_nothing(folder, capsys, monkeypatch, command, columns):
    whole = run(capsys, *command)[1].split()
    for module in (report, show, explanations):
        monkeypatch.setattr(module, "terminal_width", lambda: columns)
    status, out, _ = run(capsys, *command)
    assert status == 0
    # The name of a device is not broken.
    tables = [
        line
        for line in out.splitlines()
        if not line.lstrip().startswith("cpu:") and " in " not in line and "/" not in line and "#" not in line
    ]
    assert max(map(len, tables)) <= columns
    assert "…" not in out
    out = re.sub(r"^\(too narrow for [^)]*\)$", "", out, flags=re.M)
    # a path alone may be wider than its column
    assert all(any(word in own if "/" in own else word == own for own in whole) for word in out.split())


def on_a_terminal(columns, code):
    """Return the output of a Python program on a terminal with so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=theirs, env=environment | {"TERM": "xterm"})
    os.close(theirs)
    printed = b""
    try:
        while data := os.read(ours, 4096):
            printed += data
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(ours)
        process.wait()
    return printed.decode()


STYLES = """
import os, sys
from ejkernel.cli.tune import messages
from ejkernel.ops.utils.formatting import terminal_width
print(terminal_width())
sys.stderr = sys.stdout
messages().print("1 call")
os.environ["NO_COLOR"] = "1"
messages().print("2 calls")
"""


@pytest.mark.slow
def test_a_terminal_s_own_width_counts_and_colours_can_be_switched_off():
    width, coloured, plain = on_a_terminal(97, STYLES).splitlines()
    assert width == "97"
    assert "\x1b[1;36m1" in coloured
    assert "36m" not in plain


def test_output_to_a_pipe_is_complete():
    assert terminal_width() is None


@pytest.mark.parametrize("stream", [None, object()], ids=["none", "no file"])
def test_output_may_be_closed_or_any_object(monkeypatch, stream):
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "__stdout__", stream)
    assert terminal_width() is None


def test_an_entry_that_keeps_an_older_heuristic_is_named(folder, capsys, monkeypatch):
    program = sys.modules["explained_program"]
    inv = Invocation(kernel=program.explained, args=(jnp.ones((4, 4)),))
    kept = {"winner": {"median_us": 1.0}, "heuristic": {"median_us": 1.0}}
    PersistentCache("cache").put(inv.key, {"rows_of_first": 1, "rows_of_second": 1}, measured=kept)
    arguments = ["explain", "explained_program:step", "--cache", "cache"]
    main(arguments)
    assert "changed since" not in capsys.readouterr().out
    other = {"rows_of_first": 2, "rows_of_second": 1}
    monkeypatch.setattr(type(program.explained), "heuristic_cfg", lambda self, inv: other)
    main(arguments)
    assert "its heuristic has changed since" in " ".join(capsys.readouterr().out.split())
