# SPDX-License-Identifier: Apache-2.0
"""The inputs and reference results of a call, or of several calls that share a search; its time limits and settings."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import numpy as np

from ejkernel import compat
from ejkernel.ops.autotuner.compile.threads import AdaptiveTimeout, result_within
from ejkernel.ops.autotuner.measure.correctness import check_results, is_nowhere_finite
from ejkernel.ops.autotuner.measure.measurement import check_room, peak_bytes
from ejkernel.ops.autotuner.measure.sampling import Case
from ejkernel.ops.autotuner.process.threads import in_callers_context
from ejkernel.ops.autotuner.process.watch import Watch
from ejkernel.ops.autotuner.trials.candidates import Program, config_id, heuristic_of, loaded_or_none
from ejkernel.ops.core.callspec import array_names
from ejkernel.ops.core.examples import GivenInputs, Save, example_sets, may_be_scaled, saver, why_not_finite
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import overrides
from ejkernel.ops.core.transformations.autodiff import innermost
from ejkernel.ops.core.transformations.nodes import Choice, Node
from ejkernel.ops.errors import CandidateError, TuningError, TuningWarning
from ejkernel.ops.utils.error_text import error_text
from ejkernel.ops.utils.formatting import arguments
from ejkernel.ops.utils.messages.warn import warn

_SHARE: Final = 1 / 3  # of the time left, for compiling a reference
_LEAST: Final = 1.0  # seconds for that, at least
REFERENCE: Final = "running the reference"  # the step without candidates


@dataclasses.dataclass(slots=True, kw_only=True)
class Limits:
    """Time limits for the steps of a search; without a budget, only compiling can be abandoned in this process.

    Attributes:
        compile: For lowering and compiling one candidate.
        run: For the first call of one candidate.
        idle: Seconds of silence while measuring.
    """

    compile: AdaptiveTimeout = dataclasses.field(default_factory=lambda: AdaptiveTimeout(first=300.0, least=30.0))
    run: AdaptiveTimeout = dataclasses.field(
        default_factory=lambda: AdaptiveTimeout(first=120.0, least=20.0, factor=50.0)
    )
    idle: float = 60.0


class KeptSettings:
    """Undoes changes of `jax.config` by candidates, and reports them.

    An option changed by one candidate applies to the whole process: to the other candidates, and to the user's program
    after the search. Candidates compile side by side, so the warning names all candidates under way at the change.

    Args:
        op_id: The kernel's name in warnings.
    """

    def __init__(self, op_id: str) -> None:
        self._op_id = op_id
        self._before = compat.settings.process_settings()
        self._under_way: list[str] = []
        self._changes: dict[tuple[str, str, str], list[str]] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def during(self, *candidates: str) -> Iterator[None]:
        """Undo changes by the given candidates at the end of the `with` block; `tell` reports them."""
        with self._lock:
            self._under_way += candidates
        try:
            yield
        finally:
            with self._lock:
                changed = compat.settings.put_back(self._before)
                suspects = list(dict.fromkeys(self._under_way))
                for name, (before, after) in changed.items():
                    known = self._changes.setdefault((name, repr(before), repr(after)), list(suspects))
                    # A candidate under way at every change is the likely cause.
                    known[:] = [each for each in known if each in suspects] or suspects
                for each in candidates:
                    self._under_way.remove(each)

    def tell(self) -> None:
        """Warn of each option changed and put back."""
        with self._lock:
            changes, self._changes = self._changes, {}
        for (name, before, after), suspects in changes.items():
            change = f"changed jax.config.{name} from {before} to {after}; the change is undone"
            hint = "inside a kernel, use a context, such as `with jax.default_matmul_precision(...)`"
            who = suspects[0] if len(suspects) == 1 else f"one of {', '.join(suspects)}" if suspects else "the kernel"
            text = f"{self._op_id}: {who} {change}; {hint}."
            warn(text, TuningWarning)


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """One set of inputs that every candidate runs on.

    Attributes:
        oracle: The oracle of its call.
        number: Index of the call among the calls of the search.
        draw: Name of the set.
        case: Its description; `None` if the search has a single set.
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
        """Raise a `CandidateError` with the name of the case unless the results are within tolerance of the reference.

        Without validation, all results pass.
        """
        try:
            if self.draw in self.oracle.expected:
                self.oracle.compare(results, self.oracle.expected[self.draw], result_names(self.oracle.inv.node))
        except CandidateError as error:
            raise CandidateError(self.named(str(error))) from None

    def named(self, text: str) -> str:
        """Prefix a text with the name of the case, if the search has several cases."""
        return text if self.case is None else f"on {self.case.name}: {text}"


@dataclasses.dataclass(kw_only=True)
class Oracle:
    """The inputs and reference results of a call, and of the other calls of its search.

    Attributes:
        inv: The call.
        baseline: The configuration that replaces a missing reference, and computes the residuals.
        validate: Whether to compute reference results and compare with them.
        seed: Seed of the random inputs.
        reference: The kernel's reference for this call, compiled before.
        inputs: The user's inputs; generated from the signature if `None`.
        watch: Receives the current step and its candidates.
        limits: Time limits for the steps of the search.
        left: Returns the seconds left for the search.
        weight: Weight of the call's time in the geometric mean.
        others: The oracles of the other calls.
        partners: Configurations in force for the call's other direction (backward or forward).
    """

    inv: Invocation[Any, Any]
    baseline: Any
    validate: bool = True
    seed: int = 0
    reference: Program | None = None
    inputs: GivenInputs | None = None
    watch: Watch = dataclasses.field(default_factory=Watch)
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
        self.expected: dict[str, Sequence[Any]] = {}  # by set of inputs; empty without validation
        self._has_warned = False
        self.lacks_reference = False  # whether it did not compile in time

    @property
    def all(self) -> tuple[Oracle, ...]:
        """This oracle and the others, one per call."""
        return (self, *self.others)

    @property
    def choice(self) -> Choice:
        """The baseline, on the call's platform."""
        return Choice(config=self.baseline, platform=self.inv.platform)

    @functools.cached_property
    def forward_choice(self) -> Choice:
        """The forward's heuristic, which computes the residuals for a backward; the baseline without a heuristic."""
        forward, kernel = self.inv.forward, self.inv.node.spec.kernel
        found = [] if forward is None else heuristic_of(forward, kernel)
        return dataclasses.replace(self.choice, config=found[0]) if found else self.choice

    def saver_of(self, config: object) -> Save:
        """Return a compiled function from the forward's arrays to its outputs and residuals under `config`."""
        token = config_id(config)
        if token not in self._savers:
            self._savers[token] = saver(self.inv.node.forward, dataclasses.replace(self.choice, config=config))
        return self._savers[token]

    @property
    def sets(self) -> dict[str, list[Any]]:
        """The sets of inputs by name, generated on first use."""
        if self._sets is None:
            self._sets = self.inputs_of(self.seed)
        return self._sets

    @property
    def arrays(self) -> list[Any]:
        """The first set of inputs."""
        return next(iter(self.sets.values()))

    @property
    def workloads(self) -> list[Workload]:
        """All sets of inputs of all calls; every candidate runs on each."""
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

    def compute_references(self) -> None:
        """Generate the inputs and compute the reference results, unless this was done before.

        Raises:
            TuningError: The example inputs or the reference failed.
        """
        for oracle in self.all:
            oracle._compute_own_references()

    def _compute_own_references(self) -> None:
        if self._sets is not None:
            return
        self.begin(REFERENCE)
        try:
            with self.settings.during("the reference"):
                self._sets = self.inputs_of(self.seed)
                if self.validate:
                    self.expected = {
                        draw: self.reference_results(self.inv.node, own) for draw, own in self.sets.items()
                    }
        except TuningError:
            raise
        except BaseException as error:  # noqa: BLE001 - without inputs and results, no candidate can be checked
            has_reference = overrides(self.inv.node.spec.kernel, "reference")
            what = "the reference" if has_reference else "the heuristic, used as reference,"
            raise TuningError(
                f"{self.inv.op_id}: example inputs or {what} failed: {error_text(error, notes=True)}"
            ) from compat.programs.without_our_frames(error)
        if self.lacks_reference:
            text = "the reference takes too long to compile for so small a budget; candidates are compared with"
            warn(f"{self.inv.op_id}: {text} the heuristic's results.", TuningWarning)
        self._warn_of_non_finite_references()

    def _warn_of_non_finite_references(self) -> None:
        """Warn once if a reference result is NaN or infinite everywhere."""
        results = itertools.chain.from_iterable(map(enumerate, self.expected.values()))
        empty = [index for index, result in results if is_nowhere_finite(result)]
        if empty and not self._has_warned:
            self._has_warned = True
            kernel, names = self.inv.node.spec.kernel, result_names(self.inv.node)
            name = names[empty[0]] if names else f"result {empty[0]}"
            text = f"{self.inv.op_id}: {name} is NaN or infinite everywhere, so no wrong candidate can be detected"
            warn(f"{text}; {why_not_finite(kernel, self.inputs)}.", TuningWarning)

    def renew(self) -> None:
        """Replace the inputs used so far by new ones, and recompute the reference results."""
        for oracle in self.all:
            oracle._sets, oracle.expected = None, {}
            oracle.seed += 1
        self.compute_references()

    @property
    def may_be_scaled(self) -> bool:
        """Whether the inputs are plain random numbers and may be scaled."""
        return may_be_scaled(self.inv, self.inputs)

    @property
    def called(self) -> str:
        """The call's arguments in brief; empty unless several calls share the search."""
        return arguments(self.inv.description) if len(self.all) > 1 else ""

    def inputs_of(self, seed: int, scale: float = 1.0) -> dict[str, list[Any]]:
        """Return sets of inputs by name for a seed; `scale` multiplies the floating-point arrays of the call."""
        # A backward's residuals are computed from the generated primals, so that both are consistent.
        save, rng = self.saver_of(self.forward_choice.config), np.random.default_rng(seed)
        found = example_sets(self.inv, rng, save, self.inputs, scale=scale)
        return {draw: list(jax.block_until_ready(arrays)) for draw, arrays in found.items()}

    def reference_results(self, node: Node, arrays: Sequence[jax.Array]) -> Sequence[Any]:
        """Return the reference results for `arrays`; the baseline's results if the kernel has no reference."""
        if node not in self._references:
            self._references[node] = self._compiled_reference(node, arrays)
        return list(jax.block_until_ready(self._references[node](*arrays)))

    def _compiled_reference(self, node: Node, arrays: Sequence[jax.Array]) -> Callable[..., Any]:
        if node is self.inv.node and self.reference is not None:
            loaded: Callable[..., Any] | None = loaded_or_none(self.reference)
            if loaded is not None:
                return loaded
        left = self.left()
        compiled = None
        if self.has_reference and left < math.inf:  # a slow compilation must leave time for candidates
            job = in_callers_context(functools.partial(self._compiled, node, arrays, reference=True))
            compiled, in_time = result_within(max(_LEAST, left * _SHARE), job, self.watch.is_abandoned)
            self.lacks_reference = not in_time
        elif self.has_reference:
            compiled = self._compiled(node, arrays, reference=True)
        return compiled or self._compiled(node, arrays, reference=False)

    def _compiled(self, node: Node, arrays: Sequence[jax.Array], *, reference: bool) -> Callable[..., Any]:
        lowered = jax.jit(node.flat(dataclasses.replace(self.choice, reference=reference))).lower(*arrays)
        # It runs once: XLA's autotuning would occupy all cores for nothing.
        compiled: Callable[..., Any] = compat.executables.compiled_for_one_run(lowered, self.inv.platform)
        if node is not self.inv.node:
            check_room(peak_bytes(compiled) or 0, "the gradient")
        return compiled

    @property
    def has_reference(self) -> bool:
        """Whether the kernel has a reference that compiles within the time left."""
        return overrides(self.inv.node.spec.kernel, "reference") and not self.lacks_reference

    def compare(self, results: Sequence[object], expected: Sequence[object], names: Sequence[str]) -> None:
        """Raise a `CandidateError` unless the results are within the tolerance of their dtypes."""
        check_results(results, expected, platform=self.inv.platform, precision=self.inv.precision, names=names)

    def begin(self, what: str, *configs: object) -> None:
        """Report the current step to the watch; it may take as long as the first compilation."""
        self.watch.begin(what, configs, self.limits.compile.first)


def result_names(node: Node) -> list[str]:
    """Return the names of a backward call's results; empty for other calls, whose results have numbers."""
    root = innermost(node)
    names = [f"the gradient of {name}" for name in array_names(node.spec)]
    wrt: tuple[bool, ...] = getattr(root, "wrt", ())
    # The arguments of a second derivative have no names.
    if not root.suffix.endswith(".bwd") or len(wrt) != len(names):
        return []
    return [name for name, has in zip(names, wrt, strict=True) if has]
