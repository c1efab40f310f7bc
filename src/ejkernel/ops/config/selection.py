# SPDX-License-Identifier: Apache-2.0
"""`ConfigSelectorChain`: selects the configuration of a call and reports the tier that found it."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import threading
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar, Generic

from ejkernel.ops.config.cache import (
    AUTOTUNE,
    CHOOSER,
    ESTIMATED,
    FORWARD,
    HEURISTIC,
    MEMORY,
    OVERLAY,
    OVERRIDE,
    PERSISTENT,
    PUBLISHED,
    SHARED,
    SHIPPED,
    SISTER,
    STALE,
    ConfigCache,
    Tier,
)
from ejkernel.ops.config.cache import Consulted as Consulted
from ejkernel.ops.config.cache import Resolution as Resolution
from ejkernel.ops.config.misses.faults import Faults
from ejkernel.ops.config.misses.notes import MissedNotes, command_for
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.policy import AutotunePolicy as AutotunePolicy
from ejkernel.ops.config.policy import StalePolicy, effective_policy
from ejkernel.ops.config.request import Answer, Request
from ejkernel.ops.core.context import is_measuring
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel, has_backward_heuristic, overrides, same_code
from ejkernel.ops.core.types import Cfg, ConfigKey, Out
from ejkernel.ops.errors import KernelWarning, NoConfigError, TuningWarning, UnstableKeyError, UnstableKeyWarning
from ejkernel.ops.utils import services
from ejkernel.ops.utils.error_text import printable
from ejkernel.ops.utils.formatting import arguments
from ejkernel.ops.utils.messages.names import check_argument
from ejkernel.ops.utils.messages.warn import warn
from ejkernel.ops.utils.weak_caches import Copied, Records, living

logger = logging.getLogger(__name__)

# The missed calls of this process by key; beyond a limit, only the latest. A call is removed with its kernel.
untuned = Records[tuple[weakref.ref[Kernel[Any, Any]], Invocation[Any, Any]]]()


class ConfigSelectorChain(Copied, Generic[Cfg, Out]):
    """Finds configurations by asking the tiers in the order listed in the README.

    Args:
        cache: The memory tier; a new `ConfigCache` by default.
        persistent: The persistent tier; none by default, which also disables shipped configurations.
        autotune: Short for `policy=AutotunePolicy(autotune=...)`.
        policy: Permitted actions on a miss.
        tuner: Measures candidates: an `Autotuner`, or an object with the same method `tune`.
        persist_autotune: Whether to write tuned configurations and all measurements to `persistent`.
    """

    _anew: ClassVar = {"_making_tier": threading.Lock, "_autotune_tier": lambda: None, "_notes": lambda: None}

    def __init__(
        self,
        cache: ConfigCache | None = None,
        persistent: PersistentCache | None = None,
        autotune: bool | None = None,
        *,
        policy: AutotunePolicy | None = None,
        tuner: object = None,
        persist_autotune: bool = True,
    ) -> None:
        check_argument(cache is None or isinstance(cache, ConfigCache), "cache", "a ConfigCache", cache)
        is_cache = persistent is None or isinstance(persistent, PersistentCache)
        check_argument(is_cache, "persistent", "a PersistentCache", persistent)
        check_argument(policy is None or isinstance(policy, AutotunePolicy), "policy", "an AutotunePolicy", policy)
        check_argument(tuner is None or hasattr(tuner, "tune"), "tuner", "an Autotuner", tuner)
        self.cache = ConfigCache() if cache is None else cache
        self.persistent = persistent
        self.persist_autotune = persist_autotune
        given: dict[str, Any] = {} if autotune is None else {"autotune": autotune}
        self.policy = dataclasses.replace(policy or AutotunePolicy(), **given)
        self.faults: Faults | None = None  # known ones
        self._given_tuner = tuner
        self._autotune_tier: Any = None
        self._making_tier = threading.Lock()
        self._warned: set[str] = set()  # operations whose calls have no key
        self._namesakes: set[str] = set()
        self._notes: MissedNotes | None = None
        self._refused_to_tune = False

    @property
    def tuner(self) -> Any:
        """The tuner that measures candidates."""
        return self._autotune.default_tuner if self._given_tuner is None else self._given_tuner

    @tuner.setter
    def tuner(self, tuner: object) -> None:
        self._given_tuner = tuner

    @property
    def _autotune(self) -> Any:
        # Created on first use: it imports the whole tuner, which most programs do not need.
        with self._making_tier:
            if self._autotune_tier is None:
                self._autotune_tier = services.made.autotune_tier()
            return self._autotune_tier

    @property
    def store(self) -> Any:
        """The `MeasurementStore` beside `persistent`, read by searches; `None` without one."""
        return self._autotune.store_beside(self.persistent)

    def choose(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Cfg:
        """Return the configuration for `inv`."""
        return self.resolve(inv, kernel).config

    def resolve(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Resolution[Cfg]:
        """Return the configuration for `inv` and the tier that found it.

        Raises:
            NoConfigError: No tier has a configuration.
        """
        tried: list[Consulted] = []
        request = self._request(inv, kernel, dry=False)
        self._warn_of_namesake(kernel)
        for consulted in self._consult(request):
            tried.append(consulted)
            found = consulted.resolution
            if found is not None:
                if found.key is not None and not found.tier.is_temporary:
                    # Calls of a bucket share their key, and the heuristic's configuration for any of them fits.
                    keeps_first = overrides(kernel, "bucket")
                    self.cache.remember(found.key, found.config, found.source, keeps_first=keeps_first)
                if found.tier.is_provisional:
                    self._note_miss(request, found.source)
                logger.debug("resolved %s from %s", inv.op_id_v, found.source)
                return found
        self._note_miss(request, "error")
        raise self._no_config(request, tried)

    def _no_config(self, request: Request, tried: list[Consulted]) -> NoConfigError:
        """Return the error of a call without a configuration in any tier."""
        inv, key = request.inv, request.key
        call = "" if key is None else f"{arguments(inv.description)}, key {key.call} on {key.device}"
        # The policy's fields `autotune` and `heuristic` switch these tiers off; the advice in the error depends on it.
        asked = [consulted.tier for consulted in tried if getattr(request.policy, consulted.tier, True)]
        places = "" if self.persistent is None else ", ".join(self.persistent.places)
        if places:
            asked = [f"{tier} ({places})" if tier == PERSISTENT.name else tier for tier in asked]
        not_taken = dict.fromkeys(printable(consulted.note) for consulted in tried if consulted.is_rejected)
        saved = f"The saved entry is not used: {'; '.join(not_taken)}" if not_taken else self._nearest(request)
        command = command_for(request.kernel)
        return NoConfigError(inv.op_id, tuple(asked), call, saved, command, request.policy.note_misses)

    def _nearest(self, request: Request) -> str:
        """Return a phrase on the saved entries nearest to a call without an answer; empty if there are none."""
        persistent, key = self.persistent, request.key
        if request.policy.heuristic or key is None or persistent is None:
            return ""
        why = why_no_entry(persistent, request.inv, key)
        progress = self.store.progress(key) if persistent.path is not None else None
        if progress is not None and why.startswith("no entry"):
            why = f"{progress.without_entry}{why.removeprefix('no entry')}"
        text = "" if why == "no entry" else why.removeprefix("no entry; ")
        return text[:1].upper() + text[1:]

    def consult(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> list[Consulted]:
        """Return the answers of all tiers down to the first hit. Neither measures nor stores anything."""
        return list(self._consult(self._request(inv, kernel, dry=True, looks=True)))

    def search(
        self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out] | None, *, tuner: object = None, **options: object
    ) -> Any:
        """Search for the configuration of a call; store the winner and all measurements.

        The search starts from stored measurements of this and similar calls.

        Args:
            inv: The call.
            kernel: Its kernel.
            tuner: Measures candidates; the chain's tuner by default.
            **options: For the tuner: `policy`, `progress`, `candidates`, `compiled`, `inputs`, `weight`; and `others`,
                calls that share the configuration, which is stored for each of them. `resume=False` also measures
                again what a partial search has measured.

        Returns:
            The tuner's result.

        Raises:
            TuningError: No candidate could be measured.
            KeyboardInterrupt: The search was interrupted; the best configuration so far is stored.
        """
        return self._autotune.search(self, inv, kernel, tuner, **options)

    def remember(self, key: ConfigKey, config: Any, source: str = AUTOTUNE.name, **evidence: Any) -> None:
        """Store a tuned configuration in memory and, with `persist_autotune`, on disk with its `evidence`."""
        if self.faults is not None:
            self.faults.forget(key, config)
        self.cache.remember(key, config, source)
        if self.persistent is not None and self.persist_autotune:
            self.persistent.put(key, config, **evidence)
        untuned.pop(key, None)
        if self._notes is not None:
            self._notes.withdraw(key)

    def _note_miss(self, request: Request, source: str) -> None:
        key, persistent = request.key, self.persistent
        # Calls inside a candidate under measurement are no misses of the program.
        if key is None or is_measuring():
            return
        if key not in untuned:
            owner = weakref.ref(request.kernel, lambda _: untuned.pop(key, None))
            untuned.keep(key, (owner, request.inv.abstract(keeps_kernel=False)))
        if request.policy.note_misses and persistent is not None and persistent.path is not None:
            if self._notes is None or self._notes.cache_dir != persistent.path:
                self._notes = MissedNotes(persistent.path)
            self._notes.put(request.inv, source)

    def _request(
        self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any], *, dry: bool, looks: bool = False
    ) -> Request:
        check_argument(isinstance(inv, Invocation), "inv", "an Invocation", inv)
        key, no_key = None, ""
        try:
            key = inv.key
        except UnstableKeyError as error:
            no_key = f"the call has no key: {error}"
            # A call with `cfg=` needs no key.
            if not dry and inv.override_cfg is None:
                self._warn_unstable(inv, error)
        return Request(
            inv=inv,
            kernel=kernel,
            key=key,
            no_key=no_key,
            policy=effective_policy(self),
            cache=self.cache,
            persistent=self.persistent,
            dry=dry,
            looks=looks,
        )

    def _warn_unstable(self, inv: Invocation[Any, Any], error: UnstableKeyError) -> None:
        if inv.op_id_v in self._warned:
            return
        self._warned.add(inv.op_id_v)
        why = str(error).removeprefix(f"{inv.op_id}: ")
        warn(f"{inv.op_id}: the call cannot be cached or tuned and runs with its heuristic: {why}", UnstableKeyWarning)

    def _warn_of_namesake(self, kernel: Kernel[Any, Any]) -> None:
        if kernel.op_id_v in self._namesakes:
            return
        namesakes = [other for other in reversed(living(Kernel)) if other.op_id_v == kernel.op_id_v]
        others = [other for other in namesakes if other is not kernel and not same_code(kernel, other)]
        if others:
            self._namesakes.add(kernel.op_id_v)
            text = (
                f"{kernel.op_id_v}: two kernels of this name and version have different code, "
                f"{type(kernel).__qualname__} and {type(others[0]).__qualname__}; they share tuned configurations. "
                "Rename one of them or raise its version."
            )
            warn(text, KernelWarning)

    def _consult(self, request: Request) -> Iterator[Consulted]:
        for tier, answer in self._answers(request):
            consulted = answer if isinstance(answer, Consulted) else Consulted(tier.name, None, answer)
            if request.looks or self.faults is not None:
                faults = self.faults or Faults()
                consulted = faults.checked(consulted, request.inv, request.kernel, look=request.looks)
            yield consulted
            if consulted.resolution is not None:
                return

    def _answers(self, request: Request) -> Iterator[tuple[Tier, Answer]]:
        """Yield the tiers that may have an answer, in order, each with its answer; a tier is asked in its turn."""
        given = request.inv.override_cfg
        yield OVERRIDE, "no cfg= was given" if given is None else request.answer(given, OVERRIDE)
        yield OVERLAY, request.overlay()
        yield MEMORY, request.memory()
        yield PERSISTENT, request.saved(PERSISTENT, "use")
        yield SHIPPED, request.shipped(SHIPPED)
        if self.persistent is not None and self.persistent.shared:
            yield SHARED, request.shared()
        may_tune = request.policy.autotune
        yield AUTOTUNE, self._from_tuning(request) if may_tune else "the policy does not allow it (autotune=False)"
        if request.policy.stale != StalePolicy():
            yield STALE, request.saved(STALE, "retune")
        yield SISTER, request.shipped(SISTER)
        if request.inv.direction != "fwd":
            yield FORWARD, self._from_forward(request)
        if request.inv.platform == "tpu":  # only TPUs have tables and a simulator
            yield PUBLISHED, request.published()
            yield ESTIMATED, request.estimated()
        yield HEURISTIC, request.heuristic()

    def _from_tuning(self, request: Request) -> Answer:
        if request.inv.span is not None and request.policy.agree:
            return self._refuse_to_tune(request)
        if request.key is None:
            return request.no_key
        if request.dry:
            return "would measure the candidates"

        def known() -> Resolution[Any] | None:
            answer = request.memory()
            found = answer.resolution if isinstance(answer, Consulted) else None
            # A saved configuration was asked for before, and may be known not to run.
            return None if found is None or found.tier.is_saved else found

        found: Resolution[Any] | str = self._autotune.answer(self, request.inv, request.kernel, request.policy, known)
        return found if isinstance(found, str) else Consulted(AUTOTUNE.name, found)

    def _refuse_to_tune(self, request: Request) -> str:
        """Return why a program of several processes tunes nothing: the others would wait for this process."""
        note = "several processes run the program and would wait"
        if not request.dry and not self._refused_to_tune:
            self._refused_to_tune = True
            text = f"{request.inv.op_id}: not tuned on a miss, because {note}; tune beforehand (`ejkernel tune`)."
            warn(text, TuningWarning)
        return note

    def _from_forward(self, request: Request) -> Answer:
        if request.inv.direction == "bwd" and has_backward_heuristic(request.kernel, request.inv.platform):
            return "the kernel has a heuristic for the backward call"
        forward: Any = request.inv.forward
        # Dry: a forward call that does not run is neither tuned nor recorded as a miss.
        for consulted in self._consult(self._request(forward, request.kernel, dry=True, looks=request.looks)):
            found = consulted.resolution
            if found is not None and not found.tier.is_provisional:
                # an overlay's configuration holds only inside its block
                source = OVERLAY if found.tier is OVERLAY else FORWARD
                return Consulted(FORWARD.name, Resolution(found.config, source.name, request.key))
        return "its forward call has no measured configuration either"


class BareChooser(Generic[Cfg, Out]):
    """Adapts a user's chooser, which has only `choose`, to the interface of a chain.

    Args:
        chooser: The chooser.
    """

    def __init__(self, chooser: Any) -> None:
        self._chooser = chooser

    def resolve(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Resolution[Cfg]:
        """Return the configuration for `inv`: the override, or the chooser's choice."""
        try:
            key = inv.key
        except UnstableKeyError:
            key = None
        if inv.override_cfg is not None:
            return Resolution(inv.override_cfg, OVERRIDE.name, key)
        return Resolution(self._chooser.choose(inv, kernel), CHOOSER.name, key)

    def consult(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> list[Consulted]:
        """Return its only answer."""
        found = self.resolve(inv, kernel)
        return [Consulted(found.source, found)]


def why_no_entry(store: PersistentCache, inv: Invocation[Cfg, Out], key: ConfigKey) -> str:
    """Return why `store` has no configuration for a call: a sentence for `explain`."""
    problem = store.problem(key, None if inv.kernel is None else inv.kernel.config_type)
    if problem is not None:
        return f"there is an entry that cannot be used: {printable(problem)}"
    # Include other versions of the operation, because they show that it was tuned before.
    name = key.op.rpartition("@v")[0]
    known = [(other, entry.call) for other, entry in store.entries(name) if other.op.rpartition("@v")[0] == name]
    same = [other for other, _ in known if other.call == key.call]
    if same:
        others = [_elsewhere(other, key) for other in same]
        return f"no entry; this call was tuned {' and '.join(dict.fromkeys(others))}"
    here = [call for other, call in known if other[:2] == key[:2] and isinstance(call, dict)]
    if not here:
        elsewhere = dict.fromkeys(_elsewhere(other, key) for other, _ in known if other[:2] != key[:2])
        text = "other calls of the operation were tuned"
        why = f"{text} {' and '.join(elsewhere)}" if elsewhere else store.why_nothing
        return f"no entry; {why}" if why else "no entry"
    mine, nearest = arguments(inv.description), max(here, key=lambda call: _likeness(inv.description, call))
    if arguments(nearest) != mine:
        return f"no entry; closest tuned call: {arguments(nearest)}"
    names = {**inv.description, **nearest}.keys() - {"wiring"}  # the origin of a call is no part of its key
    others = sorted(printable(name) for name in names if inv.description.get(name) != nearest.get(name))
    return f"no entry; a call with these arguments and another value of {' and '.join(others)} was tuned"


def _likeness(wanted: object, stored: object) -> float:
    return difflib.SequenceMatcher(None, arguments(wanted), arguments(stored)).ratio()


def _elsewhere(other: ConfigKey, key: ConfigKey) -> str:
    """Return how a key of the same operation differs from the wanted one: in device, version, or both."""
    version = f"as version {printable(other.op.rpartition('@v')[2])}" if other.op != key.op else ""
    device = f"on {printable(other.device)}" if other.device != key.device else ""
    return " ".join(part for part in (version, device) if part) or "here"
