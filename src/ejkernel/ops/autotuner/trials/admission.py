# SPDX-License-Identifier: Apache-2.0
"""Which configurations may be saved as tuned: those that are measured, correct and confirmed against the heuristic."""

from __future__ import annotations

from ejkernel.ops.autotuner.trials.candidates import config_id
from ejkernel.ops.autotuner.trials.outcome import AutotuneData, Outcome
from ejkernel.ops.autotuner.trials.progress import SearchState
from ejkernel.ops.autotuner.trials.status import FAULTY, Status
from ejkernel.ops.errors import TuningError


class AdmissionError(TuningError):
    """A search names a winner that it has not measured, checked or confirmed: a defect of the search itself."""


def why_not_saved(data: AutotuneData, *, validated: bool, earlier: object = None) -> str:
    """Return why the configuration of a search is not saved; empty if it is.

    A partial search has an answer only if another candidate beat the heuristic. That one replaces an earlier
    configuration only if the search has measured the earlier one, too.

    Args:
        data: The search.
        validated: Whether candidates were compared with the reference.
        earlier: The configuration that is saved now; `None` without one.

    Raises:
        AdmissionError: the winner is not measured, not correct, or not confirmed.
    """
    progress, winner = data.progress, _winner(data)
    if progress.state == SearchState.FAILED:
        return "nothing was measured"
    if progress.state == SearchState.PARTIAL and winner is data.heuristic:
        return progress.not_finished
    _check(data, winner, validated=validated)
    if progress.state == SearchState.PARTIAL and earlier is not None and not _has_tried(data, earlier):
        return f"{progress.not_finished}, and the configuration that is saved was not measured again"
    return ""


def _winner(data: AutotuneData) -> Outcome:
    token = config_id(data.config)
    found = [outcome for outcome in data.outcomes if config_id(outcome.config) == token]
    if not found:
        raise AdmissionError(f"the winner {data.config!r} is none of the candidates")
    return found[0]


def _check(data: AutotuneData, winner: Outcome, *, validated: bool) -> None:
    if winner.status != Status.MEASURED or winner.measurement is None or not winner.measurement.samples:
        raise AdmissionError(f"the winner {winner.config!r} has no samples; its status is {winner.status}")
    if validated and "outputs" not in data.checked:
        raise AdmissionError(f"the winner {winner.config!r} was not compared with the reference")
    if winner is data.heuristic or data.heuristic.status in FAULTY:
        return
    standing = data.standing
    if standing is None or config_id(standing.rival) != config_id(winner.config):
        raise AdmissionError(f"the winner {winner.config!r} was not compared with the heuristic")
    if not (standing.alone and standing.verdict.wins and standing.verdict.settled):
        raise AdmissionError(f"the winner {winner.config!r} is not confirmed: {standing.line()}")


def _has_tried(data: AutotuneData, config: object) -> bool:
    token = config_id(config)
    tried = FAULTY | {Status.MEASURED, Status.SAME}
    return any(outcome.status in tried and config_id(outcome.config) == token for outcome in data.outcomes)
