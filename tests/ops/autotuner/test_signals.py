# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C that waits until it is looked for."""

from __future__ import annotations

import signal
import threading

import pytest

from ejkernel.ops.autotuner.process.supervisor import interrupts_held_back


@pytest.fixture(autouse=True)
def _as_in_a_shell():
    """Restore Ctrl-C, which the parent of these tests may ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_is_raised_when_polled():
    with interrupts_held_back() as held:
        signal.raise_signal(signal.SIGINT)
        assert len(held) == 1
        with pytest.raises(KeyboardInterrupt):
            held.pop()()


def test_an_unpolled_ctrl_c_is_raised_at_the_end():
    holding = interrupts_held_back()
    holding.__enter__()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        holding.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_an_ignored_ctrl_c_stays_ignored(handler):
    signal.signal(signal.SIGINT, handler)
    with interrupts_held_back() as held:
        assert signal.getsignal(signal.SIGINT) is handler
    assert held == []


def test_another_thread_holds_nothing_back():
    seen = []

    def work():
        with interrupts_held_back():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert seen == [signal.default_int_handler]
