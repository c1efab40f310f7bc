# SPDX-License-Identifier: Apache-2.0
"""`ConfigSelectorChain`: selects the configuration of a call and reports the tier that found it."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Generic

from ejkernel.ops.config import tiers
from ejkernel.ops.config.cache import ConfigCache, same_config
from ejkernel.ops.config.entries import Shipped, ShippedConfigs, shipped_configs
from ejkernel.ops.config.estimates import EstimateFiles, chosen
from ejkernel.ops.config.misses.faults import Faults
from ejkernel.ops.config.misses.nearest import why_no_entry
from ejkernel.ops.config.misses.notes import MissedNotes, command_for
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.policy import AutotunePolicy as AutotunePolicy
from ejkernel.ops.config.policy import effective_policy
from ejkernel.ops.config.staleness import Action, StalePolicy, saved_in, standing
from ejkernel.ops.config.tiers import Consulted as Consulted
from ejkernel.ops.config.tiers import Resolution as Resolution
from ejkernel.ops.config.tiers import Tier
from ejkernel.ops.core.context import current_scope, is_measuring
from ejkernel.ops.core.declared_names import check_kind, decode_config, note_config_types
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import (
    Kernel,
    check_config,
    has_backward_heuristic,
    hook,
    living_kernels,
    overrides,
    same_code,
)
from ejkernel.ops.core.types import Cfg, ConfigKey, Out
from ejkernel.ops.errors import (
    NO_HEURISTIC,
    CacheWarning,
    ConfigError,
    KernelWarning,
    NoConfigError,
    SerializationError,
    TuningWarning,
    UnstableKeyError,
    UnstableKeyWarning,
)
from ejkernel.ops.registry import forget_missed, note_missed
from ejkernel.ops.utils import services
from ejkernel.ops.utils.formatting import arguments, counted
from ejkernel.ops.utils.messages.warn import warn
from ejkernel.ops.utils.validation import check_argument
from ejkernel.ops.utils.weak_caches import Copied

logger = logging.getLogger(__name__)

_Answer = Resolution[Any] | Consulted | str  # an answer, with or without a note, or the reason for no answer


@dataclasses.dataclass(frozen=True, slots=True)
class _Request:
    inv: Invocation[Any, Any]
    kernel: Kernel[Any, Any]
    key: ConfigKey | None
    no_key: str
    policy: AutotunePolicy
    dry: bool
    looks: bool  # whether to trace the call with saved configurations

    def answer(self, config: object, tier: Tier) -> Resolution[Any]:
        return Resolution(config, tier.name, self.key)


class ConfigSelectorChain(Copied, Generic[Cfg, Out]):
    """Finds configurations by asking the tiers in the order listed in the README.

    Args:
        cache: The memory tier; a new `ConfigCache` by default.
        persistent: The persistent tier; none by default, which also disables shipped configurations.
        autotune: Short for `policy=AutotunePolicy(autotune=...)`.
        policy: Permitted actions on a miss.
        tuner: Measures candidates; an `Autotuner` by default.
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
        check_argument(persistent is None or hasattr(persistent, "get"), "persistent", "a PersistentCache", persistent)
        check_argument(policy is None or isinstance(policy, AutotunePolicy), "policy", "an AutotunePolicy", policy)
        check_argument(tuner is None or hasattr(tuner, "tune"), "tuner", "an Autotuner", tuner)
        self.cache = ConfigCache() if cache is None else cache
        self.persistent, self.persist_autotune = persistent, persist_autotune
        given: dict[str, Any] = {} if autotune is None else {"autotune": autotune}
        self.policy = dataclasses.replace(policy or AutotunePolicy(), **given)
        self.faults: Faults | None = None  # known ones
        self._given_tuner = tuner
        self._autotune_tier: Any = None
        self._making_tier = threading.Lock()
        self._warned, self._namesakes = set[str](), set[str]()
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
        """The `MeasurementStore` beside `persistent`, read by searches; `None` without a `PersistentCache`."""
        return self._autotune.store_beside(self.persistent)

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call the bound method `listener` whenever an earlier answer becomes invalid."""
        self.cache.subscribe(listener)

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
            if consulted.resolution is not None:
                self._remember(consulted.resolution, shared=overrides(kernel, "bucket"))
                if consulted.resolution.tier.is_provisional:
                    self._note_miss(request, consulted.resolution.source)
                logger.debug("resolved %s from %s", inv.op_id_v, consulted.resolution.source)
                return consulted.resolution
        self._note_miss(request, "error")
        call = "" if (key := request.key) is None else f"{arguments(inv.description)}, key {key.call} on {key.device}"
        not_taken = dict.fromkeys(consulted.note for consulted in tried if consulted.is_rejected)
        # The policy's fields `autotune` and `heuristic` switch these tiers off; the advice in the error depends on it.
        asked = [found.tier for found in tried if getattr(request.policy, found.tier, True)]
        if places := ", ".join(getattr(self.persistent, "places", ())):
            asked = [tier + f" ({places})" * (tier == tiers.PERSISTENT.name) for tier in asked]
        saved = f"The saved entry is not used: {'; '.join(not_taken)}" if not_taken else self._nearest(request)
        raise NoConfigError(inv.op_id, tuple(asked), call, saved, command_for(kernel), request.policy.note_misses)

    def _nearest(self, request: _Request) -> str:
        """Return a phrase on the saved entries nearest to a call without an answer; empty if there are none."""
        persistent, key = self.persistent, request.key
        if request.policy.heuristic or key is None or not isinstance(persistent, PersistentCache):
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

        If the tuner accepts `records`, the search starts from stored measurements of this and similar calls.

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

    def remember(self, key: ConfigKey, config: Any, source: str = tiers.AUTOTUNE.name, **evidence: Any) -> None:
        """Store a tuned configuration in memory and, with `persist_autotune`, on disk with its `evidence`."""
        if self.faults is not None:
            self.faults.forget(key, config)
        self.cache.remember(key, config, source)
        if self.persistent is not None and self.persist_autotune:
            self.persistent.put(key, config, **evidence)
        forget_missed(key)
        if self._notes is not None:
            self._notes.withdraw(key)

    def _remember(self, resolution: Resolution[Any], *, shared: bool) -> None:
        """Store an answer in memory. If calls share a key, keep the first heuristic configuration; any of them fits."""
        key, source = resolution.key, resolution.source
        if key is None or resolution.tier.is_temporary:
            return
        before = self.cache.remembered(key)
        same_kind = before is not None and type(before.config) is type(resolution.config)
        if before is not None and same_kind and shared and before.source == source and before.tier.is_provisional:
            return
        if before is None or before.source != source or not same_config(before.config, resolution.config):
            self.cache.remember(key, resolution.config, source)

    def _note_miss(self, request: _Request, source: str) -> None:
        key, persistent = request.key, self.persistent
        # Calls inside a candidate under measurement are no misses of the program.
        if key is None or is_measuring():
            return
        note_missed(request.kernel, request.inv, key)
        if request.policy.note_misses and persistent is not None and persistent.path is not None:
            if self._notes is None or self._notes.cache_dir != persistent.path:
                self._notes = MissedNotes(persistent.path)
            self._notes.put(request.inv, source)

    def _request(
        self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any], *, dry: bool, looks: bool = False
    ) -> _Request:
        check_argument(isinstance(inv, Invocation), "inv", "an Invocation", inv)
        policy = effective_policy(self)
        try:
            return _Request(inv, kernel, inv.key, "", policy, dry, looks)
        except UnstableKeyError as error:
            # A call with `cfg=` needs no key.
            if not dry and inv.override_cfg is None:
                self._warn_unstable(inv, error)
            return _Request(inv, kernel, None, f"the call has no key: {error}", policy, dry, looks)

    def _warn_unstable(self, inv: Invocation[Any, Any], error: UnstableKeyError) -> None:
        if inv.op_id_v in self._warned:
            return
        self._warned.add(inv.op_id_v)
        why = str(error).removeprefix(f"{inv.op_id}: ")
        warn(f"{inv.op_id}: the call cannot be cached or tuned and runs with its heuristic: {why}", UnstableKeyWarning)

    def _warn_of_namesake(self, kernel: Kernel[Any, Any]) -> None:
        if kernel.op_id_v in self._namesakes:
            return
        namesakes = living_kernels().get(kernel.op_id_v, ())
        others = [other for other in namesakes if other is not kernel and not same_code(kernel, other)]
        if others:
            self._namesakes.add(kernel.op_id_v)
            text = (
                f"{kernel.op_id_v}: two kernels of this name and version have different code, "
                f"{type(kernel).__qualname__} and {type(others[0]).__qualname__}; they share tuned configurations. "
                "Rename one of them or raise its version."
            )
            warn(text, KernelWarning)

    def _consult(self, request: _Request) -> Iterator[Consulted]:
        documented: tuple[tuple[Tier, Callable[[_Request], _Answer]], ...] = (
            (tiers.OVERRIDE, self._from_override),
            (tiers.OVERLAY, self._from_overlay),
            (tiers.MEMORY, self._from_memory),
            (tiers.PERSISTENT, lambda request: self._saved(request, tiers.PERSISTENT, "use")),
            (tiers.SHIPPED, lambda request: self._shipped(request, tiers.SHIPPED, ShippedConfigs.find)),
            (tiers.SHARED, self._from_shared),
            (tiers.AUTOTUNE, self._from_tuning),
            (tiers.STALE, lambda request: self._saved(request, tiers.STALE, "retune")),
            (tiers.SISTER, lambda request: self._shipped(request, tiers.SISTER, ShippedConfigs.find_of_sister)),
            (tiers.FORWARD, self._from_forward),
            (tiers.PUBLISHED, self._from_published),
            (tiers.ESTIMATED, self._from_estimates),
            (tiers.HEURISTIC, self._from_heuristic),
        )
        for tier, ask in documented:
            if (tier is tiers.SHARED and not getattr(self.persistent, "shared", ())) or (
                (tier is tiers.STALE and request.policy.stale == StalePolicy())
                # only TPUs have tables and a simulator
                or (tier in (tiers.PUBLISHED, tiers.ESTIMATED) and request.inv.platform != "tpu")
            ):
                continue  # cannot have an answer, so `explain` need not list it
            answer = ask(request)
            if isinstance(answer, str):
                consulted = Consulted(tier.name, None, answer)
            else:
                consulted = answer if isinstance(answer, Consulted) else Consulted(tier.name, answer)
            if request.looks or self.faults is not None:
                faults = self.faults or Faults()
                consulted = faults.checked(consulted, request.inv, request.kernel, look=request.looks)
            yield consulted
            if consulted.resolution is not None:
                return

    def _from_override(self, request: _Request) -> Resolution[Any] | str:
        if request.inv.override_cfg is None:
            return "no cfg= was given"
        return request.answer(request.inv.override_cfg, tiers.OVERRIDE)

    def _from_overlay(self, request: _Request) -> Resolution[Any] | str:
        layers = current_scope().layers
        if not layers:
            return "none in force"
        if request.key is None:
            return request.no_key
        for layer in reversed(layers):
            config = layer.lookup(request.key)
            if config is None:
                continue
            misfit = self._misfit(request, config, "the overlay's configuration")
            return misfit or request.answer(config, tiers.OVERLAY)
        return f"not among the entries of {counted(len(layers), 'overlay')}"

    def _from_memory(self, request: _Request) -> Resolution[Any] | str:
        if request.key is None:
            return request.no_key
        found = self.cache.remembered(request.key)
        if found is None:
            return "nothing remembered"
        # Provisional answers are stored for reports; a later tier may have a measured configuration by now.
        if found.tier.is_provisional:
            return f"only an unmeasured answer, from {found.source}"
        misfit = self._misfit(request, found.config, "the configuration in memory")
        return misfit or request.answer(found.config, found.tier)

    def _misfit(self, request: _Request, config: object, what: str) -> str:
        """Return why the kernel rejects a configuration, and warn; empty if the kernel accepts it."""
        try:
            check_config(request.kernel, config, what)
            check_kind(request.inv, request.kernel, config, what)
        except ConfigError as error:  # e.g. its class was redefined, or an older version saved it
            if not request.dry:
                warn(f"ignoring a configuration: {error}", CacheWarning)
            return f"it does not fit: {error}"
        return ""

    def _saved(self, request: _Request, tier: Tier, wanted: Action) -> _Answer:
        """Return the first saved configuration whose action under the stale policy is `wanted`."""
        if self.persistent is None:
            return "the chain has no persistent cache"
        if request.key is None:
            return request.no_key
        note_config_types(request.inv, request.kernel)
        notes = []
        # Ask each layer: the policy may refuse an entry, and a later layer may have one from the current environment.
        for config, entry in saved_in(self.persistent, request.key, request.kernel.config_type):
            misfit = self._misfit(request, config, "its entry in the persistent cache")
            if misfit:
                return misfit
            action, why = standing(request.policy.stale, entry, request.kernel, request.inv, look=request.dry)
            if action == wanted:
                return Consulted(tier.name, request.answer(config, tier), why)
            notes.append(f"{why}: the policy says {action}")
        return Consulted(tier.name, None, "; ".join(dict.fromkeys(notes)) or "no entry", is_rejected=bool(notes))

    def _shipped(self, request: _Request, tier: Tier, find: Callable[..., Shipped | None]) -> _Answer:
        """Return the shipped configuration that `find` selects, if the call can run with it here."""
        if request.key is None:
            return request.no_key
        if not getattr(self.persistent, "shipped", False):
            return "the chain does not use shipped configurations"
        note_config_types(request.inv, request.kernel)
        found = find(shipped_configs(), request.key, request.kernel.config_type)
        if found is None:
            return "no entry of a similar device" if tier is tiers.SISTER else "no entry"
        misfit = self._misfit(request, found.config, "the shipped configuration")
        # Measured elsewhere, with other versions. Only the kernel knows whether it runs with this JAX, device and
        # program. A rejection is a silent miss, listed by `explain`.
        if not misfit:
            misfit = request.kernel.why_not(request.inv, found.config)
        return misfit or Consulted(tier.name, request.answer(found.config, tier), found.note)

    def _from_shared(self, request: _Request) -> _Answer:
        """Update the copies of shared layers, then ask the persistent cache again."""
        if request.key is None:
            return request.no_key
        assert self.persistent is not None  # `_consult` asks this tier only if it has shared layers
        self.persistent.refresh_if_due()
        return self._saved(request, tiers.SHARED, "use")

    def _from_tuning(self, request: _Request) -> Resolution[Any] | str:
        if not request.policy.autotune:
            return "the policy does not allow it (autotune=False)"
        if request.inv.span is not None and request.policy.agree:
            return self._refuse_to_tune(request)
        if request.key is None:
            return request.no_key
        if request.dry:
            return "would measure the candidates"

        def known() -> Resolution[Any] | None:
            found = self._from_memory(request)
            # A saved configuration was asked for before, and may be known not to run.
            return found if isinstance(found, Resolution) and not found.tier.is_saved else None

        found: Resolution[Any] | str = self._autotune.answer(self, request.inv, request.kernel, request.policy, known)
        return found

    def _refuse_to_tune(self, request: _Request) -> str:
        """Return why a program of several processes tunes nothing: the others would wait for this process."""
        note = "several processes run the program and would wait"
        if not request.dry and not self._refused_to_tune:
            self._refused_to_tune = True
            text = f"{request.inv.op_id}: not tuned on a miss, because {note}; tune beforehand (`ejkernel tune`)."
            warn(text, TuningWarning)
        return note

    def _from_forward(self, request: _Request) -> Resolution[Any] | str:
        forward = request.inv.forward
        if forward is None:
            return "the call is a forward call"
        if request.inv.direction == "bwd" and has_backward_heuristic(request.kernel, request.inv.platform):
            return "the kernel has a heuristic for the backward call"
        # Dry: a forward call that does not run is neither tuned nor recorded as a miss.
        for consulted in self._consult(self._request(forward, request.kernel, dry=True, looks=request.looks)):
            found = consulted.resolution
            if found is not None and not found.tier.is_provisional:
                # an overlay's configuration holds only inside its block
                return request.answer(found.config, tiers.OVERLAY if found.tier is tiers.OVERLAY else tiers.FORWARD)
        return "its forward call has no measured configuration either"

    def _from_published(self, request: _Request) -> _Answer:
        """Return the preferred configuration that others published, unless it does not run here."""
        if not getattr(self.persistent, "shipped", False):
            return "the chain does not use shipped configurations"
        notes = []
        for found in request.kernel.published(request.inv):
            why = found.why_not or found.why_not_untuned
            if not why:
                return Consulted(tiers.PUBLISHED.name, request.answer(found.config, tiers.PUBLISHED), found.note)
            notes.append(why)
        return "; ".join(dict.fromkeys(notes)) or "none for this call"

    def _from_estimates(self, request: _Request) -> _Answer:
        """Return the fastest configuration by estimates, if it leads the heuristic by more than their error."""
        folder = getattr(self.persistent, "path", None)
        if request.key is None or folder is None:
            return request.no_key or "the chain has no persistent cache"
        found = EstimateFiles(folder).load(request.key)
        if found is None:
            return "no estimates"
        best, note = chosen(found)
        if best is None or best.is_heuristic:
            return f"the heuristic is the fastest: {note}" if best is not None else note
        note_config_types(request.inv, request.kernel)
        try:
            config = decode_config(best.config, best.config_type)
        except (ConfigError, SerializationError) as error:  # of another version of the kernel
            return f"the estimated configuration cannot be read: {error}"
        misfit = self._misfit(request, config, "the estimated configuration")
        misfit = misfit or request.kernel.why_not(request.inv, config)
        return misfit or Consulted(tiers.ESTIMATED.name, request.answer(config, tiers.ESTIMATED), note)

    def _from_heuristic(self, request: _Request) -> Resolution[Any] | str:
        if not request.policy.heuristic:
            return "the policy does not allow it (heuristic=False)"
        try:
            config = hook(request.kernel, "heuristic_cfg", request.inv.platform)(request.inv)
        except NoConfigError:
            return NO_HEURISTIC
        return request.answer(config, tiers.HEURISTIC)
