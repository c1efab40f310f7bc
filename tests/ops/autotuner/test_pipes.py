# SPDX-License-Identifier: Apache-2.0
"""Messages over a pipe with a writer that never blocks."""

from __future__ import annotations

import multiprocessing
import os
import threading

import pytest

from ejkernel.ops.autotuner.process import serve
from ejkernel.ops.autotuner.process.messages import Began, Exchange, read_message, write_message

LARGE = os.urandom(1 << 22)  # more than a pipe holds


@pytest.fixture
def ends():
    ours, theirs = multiprocessing.Pipe()
    yield Exchange(ours), theirs
    theirs.close()
    ours.close()


def taken(exchange, other):
    while (message := exchange.take()) is None:
        exchange.wait(other.fileno(), 0.05)
    return message


@pytest.mark.parametrize("data", [b"", b"short", LARGE], ids=["empty", "short", "large"])
def test_a_sent_message_is_received(ends, data):
    exchange, other = ends
    echo = threading.Thread(target=lambda: write_message(other, read_message(other)))
    echo.start()
    exchange.post(data)
    assert taken(exchange, other) == data
    echo.join(60)


def test_a_reader_that_does_not_read_does_not_block_the_writer(ends):
    exchange, other = ends
    exchange.post(LARGE)
    exchange.wait(other.fileno(), 0.0)
    assert exchange.take() is None


def test_a_truncated_message_does_not_block_the_reader(ends):
    exchange, other = ends
    os.write(other.fileno(), (1000).to_bytes(8, "big") + b"half")
    exchange.wait(other.fileno(), 0.05)
    assert exchange.take() is None
    other.close()
    with pytest.raises(EOFError):
        taken(exchange, exchange._pipe)


def test_garbage_from_a_candidate_in_the_pipe_is_detected(ends):
    exchange, other = ends
    os.write(other.fileno(), b"a line of text")
    assert taken(exchange, other) == b"a line of text"


def test_messages_before_the_end_are_not_lost(ends):
    exchange, other = ends
    write_message(other, b"last words")
    other.close()
    exchange.post(b"nobody gets this")
    assert taken(exchange, exchange._pipe) == b"last words"
    with pytest.raises(EOFError):
        taken(exchange, exchange._pipe)


def test_a_worker_without_its_parent_ends_quietly(monkeypatch):
    class Ended(BaseException):
        pass

    def end(status):
        raise Ended(status)

    monkeypatch.setattr(serve.os, "_exit", end)
    ours, theirs = multiprocessing.Pipe()
    ours.close()
    worker = serve.Reports(theirs, [0] * serve.SHARED, None)
    with theirs, pytest.raises(Ended):
        worker.send(Began("running", [], 1.0))
