# SPDX-License-Identifier: Apache-2.0
"""The inputs of a call, or of several calls that share a search, and what is right on them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import numpy as np

from ejkernel import compat
from ejkernel.ops.autotuner.bench.limits import Limits
from ejkernel.ops.autotuner.bench.settings import KeptSettings
from ejkernel.ops.autotuner.compile.threads import result_within
from ejkernel.ops.autotuner.measure.cases import Case
from ejkernel.ops.autotuner.measure.correctness import check_results, is_nowhere_finite
from ejkernel.ops.autotuner.measure.memory import check_room, peak_bytes
from ejkernel.ops.autotuner.process.threads import in_callers_context
from ejkernel.ops.autotuner.process.watch import Unwatched, Watch
from ejkernel.ops.autotuner.trials.candidates import config_id, heuristic_of
from ejkernel.ops.autotuner.trials.naming import result_names
from ejkernel.ops.autotuner.trials.programs import Program
from ejkernel.ops.core.examples import GivenInputs, Save, example_sets, may_be_scaled, saver, why_not_finite
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import overrides
from ejkernel.ops.core.transformations.nodes import Choice, Node
from ejkernel.ops.errors import CandidateError, TuningError, TuningWarning
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.formatting import arguments
from ejkernel.ops.utils.messages.warn import warn

_SHARE: Final = 1 / 3  # of what is left, in which a reference has to be compiled
_LEAST: Final = 1.0  # second, of that
REFERENCE: Final = "running the reference"  # what no candidate is to blame for


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """One set of inputs that every candidate runs on.

    Attributes:
        oracle: Of its call.
        number: Of that call, among those that share a search.
        draw: Name of the set.
        case: What it is called; `None` if there is no other.
    """

    oracle: Oracle
    number: int
    draw: str
    case: Case | None = None

    @property
    def arrays(self) -> list[Any]:
        """The inputs."""
        return self.oracle.sets[self.draw]

    def judge(self, results: Sequence[object]) -> None:
        """Raise a `CandidateError`, which says where, unless the results are right."""
        try:
            self.oracle.judge(results, self.draw)
        except CandidateError as error:
            raise CandidateError(self.named(str(error))) from None

    def named(self, text: str) -> str:
        """Return a text with where it is so, if there is more than one place."""
        return text if self.case is None else f"on {self.case.name}: {text}"


@dataclasses.dataclass(kw_only=True)
class Oracle:
    """Knows a call's inputs, and what is right on them; and those of other calls that share its search.

    Attributes:
        inv: The call.
        baseline: The configuration that stands for a reference where the kernel has none; its residuals are used.
        validate: Whether anybody wants to know what is right.
        seed: Of the random inputs.
        reference: The kernel's reference for this call, compiled before.
        inputs: What the user wants to measure with; made from the signature otherwise.
        watch: Who must know what is under way.
        limits: How long the parts of the search may take.
        left: The seconds that are left for the search.
        weight: How much the call counts beside others.
        others: Of the other calls.
        partners: Configurations in force for the call's other direction: a forward's backward, a backward's forward.
    """

    inv: Invocation[Any, Any]
    baseline: Any
    validate: bool = True
    seed: int = 0
    reference: Program | None = None
    inputs: GivenInputs | None = None
    watch: Watch = dataclasses.field(default_factory=Unwatched)
    limits: Limits = dataclasses.field(default_factory=Limits)
    left: Callable[[], float] = lambda: math.inf
    weight: float = 1.0
    others: Sequence[Oracle] = ()
    partners: Sequence[Any] = ()

    def __post_init__(self) -> None:
        self.settings = KeptSettings(self.inv.op_id)
        self.contract_fault = ""  # how forward and backward disagree on residuals
        self._savers: dict[Any, Save] = {}
        self._references: dict[Node, Callable[..., Any]] = {}
        self._sets: dict[str, list[Any]] | None = None
        self._truths: dict[str, Sequence[Any]] = {}
        self._is_doubted = False
        self._lacks_reference = False

    @property
    def all(self) -> tuple[Oracle, ...]:
        """This one and the others, each of one call."""
        return (self, *self.others)

    @property
    def choice(self) -> Choice:
        """The baseline, on the call's platform."""
        return Choice(config=self.baseline, platform=self.inv.platform)

    @functools.cached_property
    def forward_choice(self) -> Choice:
        """The forward's heuristic, whose residuals a backward is checked with; the baseline without one."""
        forward, kernel = self.inv.forward, self.inv.node.spec.kernel
        found = [] if forward is None else heuristic_of(forward, kernel)
        return dataclasses.replace(self.choice, config=found[0]) if found else self.choice

    def saver_of(self, config: object) -> Save:
        """Return a compiled function from the forward's arrays to what it leaves under a configuration."""
        token = config_id(config)
        if token not in self._savers:
            self._savers[token] = saver(self.inv.node.forward, dataclasses.replace(self.choice, config=config))
        return self._savers[token]

    @property
    def sets(self) -> dict[str, list[Any]]:
        """The sets of inputs, by name; made when first asked for."""
        if self._sets is None:
            self._sets = self.inputs_of(self.seed)
        return self._sets

    @property
    def arrays(self) -> list[Any]:
        """The first set of inputs."""
        return next(iter(self.sets.values()))

    @property
    def workloads(self) -> list[Workload]:
        """What every candidate runs on: all sets of inputs of all calls."""
        total, several = sum(oracle.weight for oracle in self.all), len(self.all) > 1
        if not several and len(self.sets) == 1:
            return [Workload(self, 0, draw) for draw in self.sets]
        return [
            Workload(oracle, number, draw, oracle._case(draw, oracle.weight / total, several))
            for number, oracle in enumerate(self.all)
            for draw in oracle.sets
        ]

    def _case(self, draw: str, weight: float, several: bool) -> Case:
        called = arguments(self.inv.description) if several else ""
        return Case(call=self.inv.call_key, arguments=called, draw=draw, weight=weight / len(self.sets))

    def find_truth(self) -> None:
        """Make the inputs and the reference's results, if that was not done before.

        Raises:
            TuningError: there are no inputs, or no truth about them.
        """
        for oracle in self.all:
            oracle._find_own_truth()

    def _find_own_truth(self) -> None:
        if self._sets is not None:
            return
        has_reference = overrides(self.inv.node.spec.kernel, "reference")
        what = "the reference" if has_reference else "the heuristic, which stands for a reference,"
        self.begin(REFERENCE)
        with self.settings.during("the reference"):
            self._compute_truth(what)
        if self._lacks_reference:
            text = "the reference takes too long to compile for so small a budget; candidates are compared with"
            warn(f"{self.inv.op_id}: {text} the heuristic's results.", TuningWarning)
        self._doubt_truth()

    def _compute_truth(self, what: str) -> None:
        try:
            self._sets = self.inputs_of(self.seed)
            if self.validate:
                self._truths = {draw: self.truth_about(self.inv.node, own) for draw, own in self._sets.items()}
        except TuningError:
            raise
        except BaseException as error:  # whatever it is, without inputs and truth no candidate can be judged
            raise TuningError(f"{self.inv.op_id}: example inputs or {what} failed: {error_text(error)}") from error

    def _doubt_truth(self) -> None:
        """Warn, once, of results that tell nothing."""
        empty = [index for index, result in self._results() if is_nowhere_finite(result)]
        if empty and not self._is_doubted:
            self._is_doubted = True
            kernel, names = self.inv.node.spec.kernel, result_names(self.inv.node)
            name = names[empty[0]] if names else f"result {empty[0]}"
            text = (
                f"{self.inv.op_id}: {name} is NaN or infinite everywhere, so that candidates cannot be told from wrong"
            )
            warn(f"{text} ones; {why_not_finite(kernel, self.inputs)}.", TuningWarning)

    def _results(self) -> Iterator[tuple[int, Any]]:
        for truth in self._truths.values():
            yield from enumerate(truth)

    def renew(self) -> None:
        """Put new inputs in place of those that the candidates were checked and measured on so far."""
        for oracle in self.all:
            oracle._sets, oracle._truths = None, {}
            oracle.seed += 1
        self.find_truth()

    @property
    def has_fixed_inputs(self) -> bool:
        """Whether every set of inputs is the same: the arrays that the user gave."""
        return self.inputs is not None and not callable(self.inputs.source)

    @property
    def may_be_scaled(self) -> bool:
        """Whether the inputs are plain random numbers, which may be multiplied by a factor."""
        return may_be_scaled(self.inv, self.inputs)

    @property
    def called(self) -> str:
        """The call's arguments, in short, where several calls share the search."""
        return arguments(self.inv.description) if len(self.all) > 1 else ""

    def inputs_of(self, seed: int, scale: float = 1.0) -> dict[str, list[Any]]:
        """Return sets of inputs, by name, made with a seed; `scale` multiplies the call's own floating-point arrays."""
        # They come from the signature; residuals of a backward are computed from them, so that they belong together.
        choice, rng = self.forward_choice, np.random.default_rng(seed)
        save = self.saver_of(choice.config)
        found = example_sets(self.inv, rng, choice, self.inputs, save=save, scale=scale)
        return {draw: list(jax.block_until_ready(arrays)) for draw, arrays in found.items()}

    def truth_about(self, node: Node, arrays: Sequence[jax.Array]) -> Sequence[Any]:
        """Return what the reference makes of `arrays`; where the kernel has none, the baseline."""
        if node not in self._references:
            self._references[node] = self._compiled_reference(node, arrays)
        return list(jax.block_until_ready(self._references[node](*arrays)))

    def _compiled_reference(self, node: Node, arrays: Sequence[jax.Array]) -> Callable[..., Any]:
        if node is self.inv.node and self.reference is not None:
            loaded: Callable[..., Any] = self.reference.load()
            return loaded
        left = self.left()
        compiled = None
        if self.has_reference and left < math.inf:  # else it would take what candidates are to be measured in
            job = in_callers_context(functools.partial(self._compiled, node, arrays, reference=True))
            compiled, in_time = result_within(max(_LEAST, left * _SHARE), job, self.watch.is_abandoned)
            self._lacks_reference = not in_time
        elif self.has_reference:
            compiled = self._compiled(node, arrays, reference=True)
        return compiled or self._compiled(node, arrays, reference=False)

    def _compiled(self, node: Node, arrays: Sequence[jax.Array], *, reference: bool) -> Callable[..., Any]:
        lowered = jax.jit(node.flat(dataclasses.replace(self.choice, reference=reference))).lower(*arrays)
        # It runs once: XLA's own search for fast algorithms would keep all cores busy for it.
        compiled: Callable[..., Any] = compat.compiled_for_one_run(lowered, self.inv.platform)
        if node is not self.inv.node:
            check_room(peak_bytes(compiled) or 0, "the gradient")
        return compiled

    @property
    def has_reference(self) -> bool:
        """Whether the kernel says what is right, and that can be had in the time that there is."""
        return overrides(self.inv.node.spec.kernel, "reference") and not self._lacks_reference

    def judge(self, results: Sequence[object], draw: str) -> None:
        """Raise a `CandidateError` unless results of the call, on a set of inputs, are as near to the truth as can be.

        Nothing is said where nobody wants to know.
        """
        if draw in self._truths:
            self.compare(results, self._truths[draw], result_names(self.inv.node))

    def compare(self, results: Sequence[object], truth: Sequence[object], names: Sequence[str]) -> None:
        """Raise a `CandidateError` unless the results are as near to the truth as their dtypes allow."""
        check_results(results, truth, platform=self.inv.platform, precision=self.inv.precision, names=names)

    def begin(self, what: str, *configs: object) -> None:
        """Say what the device works on, which may take as long as the first compilation."""
        self.watch.begin(what, configs, self.limits.compile.first)
