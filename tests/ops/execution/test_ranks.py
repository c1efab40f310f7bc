# SPDX-License-Identifier: Apache-2.0
"""Three processes that run one program, on this machine's loopback, and their answers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each launch starts JAX in every process
PROGRAM = Path(__file__).with_name("rank_program.py")
LONGEST_S = 120


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launched(count, folder):
    """Return the answers of each process of one launch, by question."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(port), str(index), str(count), str(folder)],
            env={**os.environ, "PYTHONHASHSEED": str(index), "EJKERNEL_CACHE_DIR": str(folder / str(index))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=LONGEST_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    statuses = [process.returncode for process in processes]
    assert statuses == [*[0] * (count - 1), -signal.SIGKILL], "\n".join(errors for _, errors in outputs)
    # Gloo prints between the lines
    return [dict(map(json.loads, (line for line in said.splitlines() if line.startswith('["')))) for said, _ in outputs]


@pytest.fixture(scope="module", params=[3, pytest.param(2, marks=pytest.mark.whole)])
def ranks(request, tmp_path_factory):
    """The answers of three processes: one that decides, one that follows and lives, and one that dies."""
    return launched(request.param, tmp_path_factory.mktemp("ranks"))


def answers(ranks, question):
    return [found[question] for found in ranks]


def test_all_processes_run_one_configuration_despite_different_caches(ranks):
    for where in ("", "_under_shard_map", "_of_a_call_that_is_split"):
        question = f"differing_caches{where}"
        first, *others = answers(ranks, question)
        assert 10 <= first < 10 + len(ranks)
        assert others == [first] * len(others)


def test_the_order_of_lowering_does_not_matter(ranks):
    first, *others = answers(ranks, "orders_of_lowering")
    assert [int(config) // 100 for config in first] == [0, 1, 2, 3, 4, 5]
    assert others == [first] * len(others)


def test_a_decision_of_one_process_holds_for_the_others(ranks):
    assert answers(ranks, "lowered_by_one_alone") == [20 + len(ranks) - 1] * len(ranks)


def test_a_program_on_a_processs_own_device_has_its_own_configuration(ranks):
    assert answers(ranks, "own_device") == [30] * len(ranks)


def test_an_overlay_that_all_enter_is_in_force_in_all(ranks):
    assert answers(ranks, "overlay_in_all") == [[True, 3, 4]] * len(ranks)


def test_an_overlay_in_one_process_is_an_error_there(ranks):
    others = answers(ranks, "overlay_in_one")
    error = others.pop(1)
    assert others == ["lowered"] * len(others)
    assert "odd_one@v0:" in error
    assert "1 (from no overlay), but process 1 would use 5 (from overlay " in error


def test_a_decision_outlives_a_change_of_the_caches(ranks):
    assert answers(ranks, "retuned") == [[50, 50]] * len(ranks)


def test_digests_of_processes_that_ran_the_same_are_equal(ranks):
    first, *others = answers(ranks, "digests")
    assert first[1] == 0
    assert others == [first] * len(others)


def test_processes_do_not_wait_for_a_dead_one(ranks):
    first, *others = [found["after_a_death"] for found in ranks[:-1]]
    assert len(first) == 3
    assert others == [first] * len(others)
