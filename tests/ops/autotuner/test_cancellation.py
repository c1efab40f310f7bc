# SPDX-License-Identifier: Apache-2.0
"""How a search is asked for its end."""

from __future__ import annotations

from ejkernel.ops.autotuner.process.watch import Cancellation


def test_a_cancellation_is_not_requested_at_first_and_permanent_afterwards():
    cancellation = Cancellation()
    before = cancellation.is_requested
    cancellation.request()
    cancellation.request()
    assert (before, cancellation.is_requested) == (False, True)


def test_the_end_of_all_is_the_end_of_each_and_not_the_other_way_round():
    device = Cancellation()
    one, other = Cancellation(within=device), Cancellation(within=device)
    one.request()
    assert (one.is_requested, other.is_requested, device.is_requested) == (True, False, False)
    device.request()
    assert other.is_requested
