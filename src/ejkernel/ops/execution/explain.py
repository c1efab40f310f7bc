# SPDX-License-Identifier: Apache-2.0
"""Explanations of a call's configuration: the answer of each tier."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from ejkernel import compat
from ejkernel.ops.config.agreement.agreement import agreed_before
from ejkernel.ops.config.cache import AUTOTUNE, MEMORY, ORDER, OVERLAY, OVERRIDE, PERSISTENT, SHARED
from ejkernel.ops.config.entries import StepNote, StoredEntry, text_of_differences
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.selection import BareChooser, ConfigSelectorChain, Consulted, Resolution, why_no_entry
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import kernel_of, overrides
from ejkernel.ops.core.sharding.nodes import rule_of
from ejkernel.ops.core.transformations.nodes import Choice
from ejkernel.ops.core.types import Cfg, ConfigKey, Out
from ejkernel.ops.errors import UnstableKeyError
from ejkernel.ops.utils.error_text import printable
from ejkernel.ops.utils.fingerprint import name_of_device
from ejkernel.ops.utils.formatting import arguments, cases, compact, counted, terminal_width, wrapped
from ejkernel.ops.utils.meta import label
from ejkernel.ops.utils.services import Shown
from ejkernel.ops.utils.storage.serialize import to_data

if TYPE_CHECKING:
    from ejkernel.ops.autotuner.store.log import StoredSearch
    from ejkernel.ops.autotuner.trials.status import SearchProgress


# Answers of tiers that say nothing about the call.
_USUAL = frozenset(
    {
        "no cfg= was given",
        "none in force",
        "nothing remembered",
        "no entry",
        "no entry of a similar device",
        "no estimates",
        "none for this call",
        "the policy does not allow it (autotune=False)",
        "the kernel has a heuristic for the backward call",
        "its forward call has no measured configuration either",
    }
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Shown):
    """How a call's configuration was chosen; `str(explanation)` is readable text.

    Attributes:
        op_id_v: The operation with its version.
        arguments: The arguments of the call as short text, e.g. `bf16[4,1024,8,64] x3, causal=True`; empty without a
            key.
        key: The key of the call; `None` if a static argument has no stable name.
        key_note: Why the call has no key.
        label: The label in the program's text, or `None`.
        label_note: Why the call has no label.
        tiers: The tiers in the order asked, with their answers.
        resolution: The answer; `None` if no tier has one.
        refusals: For each implementation that does not support the call, the reason.
        split: Axes along which the call may be split over devices.
        split_note: Why the call cannot be split.
        search: State of the search for its configuration; `None` without a search.
        search_note: Why the search failed, is not finished or undecided, or how it was decided, and why a newer search
            saved nothing; may be empty if it is complete and the newest.
        candidates: The command that prints the candidates of the search, or where they are; empty without a search.
        runs: The configuration with the parameters that the call runs with, if another call's was found.
    """

    op_id_v: str
    key: ConfigKey | None
    key_note: str
    label: str | None
    label_note: str
    tiers: tuple[Consulted, ...]
    resolution: Resolution[Any] | None
    refusals: Mapping[str, str] = dataclasses.field(default_factory=dict)
    split: tuple[str, ...] = ()
    split_note: str = ""
    search: SearchProgress | None = None
    search_note: str = ""
    candidates: str = ""
    runs: Any = None
    arguments: str = ""

    @property
    def config(self) -> Any:
        """The configuration, or `None`."""
        return None if self.resolution is None else self.resolution.config

    @property
    def source(self) -> str | None:
        """The tier that it came from, or `None`."""
        return None if self.resolution is None else self.resolution.source

    def __str__(self) -> str:
        return self.text()

    def text(self, *, verbose: bool = False, target: str = "") -> str:
        """Return it as text.

        Args:
            verbose: Whether every tier has a line, also one that has no answer for the usual reason or was not asked.
            target: The name of the target that the call is explained for; empty for this device.
        """
        lines = (f"  {name:<10} {text}" for name, text in self.facts(verbose=verbose, target=target))
        # Keys, notes and configurations may quote files.
        every = (f"{self.op_id_v}  {self.arguments}".rstrip(), *lines, f"  => {self.answer}")
        return "\n".join(wrapped(printable(line), terminal_width(), indent=13) for line in every)

    def facts(self, *, verbose: bool = False, target: str = "") -> list[tuple[str, str]]:
        """Return the key, the answers of the tiers, and what else is known about the call, each with its name."""
        said = [
            ("key", f"{self.key.call} on {self.key.device}" if self.key else f"none: {self.key_note}"),
            *self._tiers(verbose),
            *((name, f"does not run: {reason}") for name, reason in self.refused.items()),
            ("others", self.elsewhere(target)),
            *([("search", self.search_text), ("candidates", self.candidates)] if self.search_text else []),
            ("devices", f"split {', '.join(self.split)}" if self.split else self.split_note),
            ("label", f"{self.label} (its name in the program's text)" if self.label else f"none: {self.label_note}"),
        ]
        return [(name, text) for name, text in said if text]

    def _tiers(self, verbose: bool) -> list[tuple[str, str]]:
        """Return the tiers that say something about the call, or every tier, each with its answer."""
        found = {tier.tier: _answer_text(tier) for tier in self.tiers}
        if verbose:
            known = {tier.name: f"not asked{tier.only and f': only {tier.only}'}" for tier in ORDER}
            # A user's own chooser asks no tiers.
            return list((known | found if found.keys() <= known.keys() else found).items())
        silent = [tier.tier for tier in self.tiers if tier.resolution is None and tier.note in _USUAL]
        return [("no answer", ", ".join(silent)), *(each for each in found.items() if each[0] not in silent)]

    @property
    def search_text(self) -> str:
        """The state of the search with its note, as text; empty without a search."""
        if self.search is None:
            return ""
        between = "; " if self.search.state == "complete" else ": "
        return between.join(filter(None, (self.search.in_words, self.search_note)))

    @property
    def answer(self) -> str:
        """The configuration that the call runs with, and its source, as text."""
        return f"{compact(self.runs)}, from {self.source}" if self.resolution else "no configuration"

    @property
    def refused(self) -> dict[str, str]:
        """The refusals because of the call rather than the device."""
        return {name: reason for name, reason in self.refusals.items() if not self._is_elsewhere(reason)}

    def elsewhere(self, target: str = "") -> str:
        """Return a sentence with the number of implementations for other devices; empty without any.

        Args:
            target: See `text`.
        """
        count = len(self.refusals) - len(self.refused)
        do = "does" if count == 1 else "do"
        where, option = (target, f" --target {target}") if target else ("this device", "")
        text = f"{counted(count, 'implementation')} {do} not run on {where}; see `ejkernel list{option}`"
        return text if count else ""

    def _is_elsewhere(self, reason: str) -> bool:
        return self.key is not None and f"this call is for {name_of_device(self.key.device)}" in reason


def _answer_text(consulted: Consulted) -> str:
    if consulted.resolution is None:
        return consulted.note
    return f"{compact(consulted.resolution.config)}{f'  ({consulted.note})' if consulted.note else ''}"


class Explanations(tuple[Explanation, ...], Shown):
    """One explanation for each kernel call in a function; `str(explanations)` is readable text."""

    def __str__(self) -> str:
        return "\n\n".join(map(str, self)) or "no kernel is called"


def explain_call(chooser: object, inv: Invocation[Cfg, Out], prefix: str) -> Explanation:
    """Ask every tier of `chooser` about `inv`, without measuring or saving anything."""
    kernel = kernel_of(inv)
    consult: Callable[..., list[Consulted]] = getattr(chooser, "consult", None) or BareChooser(chooser).consult
    try:
        key, key_note = inv.key, ""
    except UnstableKeyError as error:
        key, key_note = None, str(error)
    tiers = _with_agreement(consult(inv, kernel), inv)
    if key is not None:
        tiers = tuple(_with_entry(_of_origin(tier), chooser, inv, key) for tier in tiers)
    resolution = tiers[-1].resolution if tiers else None
    text, note = _label_of(inv, key, resolution, prefix)
    split, split_note = _split_of(inv)
    return Explanation(
        op_id_v=inv.op_id_v,
        key=key,
        key_note=key_note,
        label=text,
        label_note=note,
        tiers=tiers,
        resolution=resolution,
        refusals=kernel.refusals(inv),
        split=split,
        split_note=split_note,
        **_search_of(chooser, key),
        runs=None if resolution is None else kernel.completed(inv, resolution.config),
        arguments="" if key is None else arguments(inv.description),
    )


def _search_of(chooser: object, key: ConfigKey | None) -> dict[str, Any]:
    """Return the fields of `Explanation` about the search for a call's configuration."""
    store = chooser.store if isinstance(chooser, ConfigSelectorChain) else None
    progress = None if store is None or key is None else store.progress(key)
    if store is None or progress is None:
        return {}
    history = store.history(key)
    if history is None:
        away = "not here: the configuration was copied without its search, which stays in the cache it comes from"
        unusable = store.unusable(key)
        return {"search": progress, "candidates": f"unknown: {unusable}" if unusable else away}
    found, newest = history.shown, history.searches[0]
    why = found.why if found.progress == progress else ""
    later = f"a newer search is not saved: {newest.not_saved or newest.in_a_word}" if newest is not found else ""
    note = "; ".join(filter(None, (why, later)))
    return {"search": progress, "search_note": note, "candidates": _command_for(found)}


def _command_for(search: StoredSearch) -> str:
    """Return the command that prints the candidates of a search."""
    assert search.path is not None  # it was loaded from a file
    folder = search.path.parents[2]
    usual = folder in tuple(PersistentCache().folders())
    place = "" if usual else f" --cache {shlex.quote(str(folder))}"
    return f"ejkernel show{place} --log {search.key.op.partition('@')[0]}:{search.key.call}"


def _split_of(inv: Invocation[Cfg, Out]) -> tuple[tuple[str, ...], str]:
    """Return the axes along which the call may be split; if none, and with several devices, the reason."""
    kernel = inv.node.spec.kernel
    if not overrides(kernel, "sharding_rule"):
        several = jax.device_count() > 1
        return (), "no sharding_rule: each device computes the whole call" if several else ""
    # Rules of derived calls follow from the forward's.
    rule = rule_of(kernel, inv.forward or inv)
    if rule is None or not rule.splittable:
        return (), "sharding_rule does not split this call: each device computes the whole call"
    return rule.splittable, ""


def _with_agreement(tiers: Sequence[Consulted], inv: Invocation[Cfg, Out]) -> tuple[Consulted, ...]:
    """Insert the configuration that the processes of the program have agreed on, after the overlay tier."""
    found = agreed_before(inv, tiers[-1].resolution if tiers else None)
    if found is None:
        return tuple(tiers)
    at = sum(tier.tier in (OVERRIDE.name, OVERLAY.name) for tier in tiers)
    return (*tiers[:at], found, *(tiers[at:] if found.resolution is None else ()))


def _of_origin(tier: Consulted) -> Consulted:
    """Return a remembered answer under the tier that found it first."""
    found = tier.resolution
    if tier.tier != MEMORY.name or found is None or found.source == MEMORY.name:
        return tier
    return dataclasses.replace(tier, tier=found.source, note="; ".join(filter(None, (tier.note, "in memory"))))


def _with_entry(tier: Consulted, chooser: object, inv: Invocation[Cfg, Out], key: ConfigKey) -> Consulted:
    """Add the measured times of a saved answer, its location, and the calls for which it was chosen.

    If the persistent tier has no answer, add the nearest entry, or another reason.
    """
    store, found = getattr(chooser, "persistent", None), tier.resolution
    is_saved = tier.tier in (PERSISTENT.name, SHARED.name, MEMORY.name, AUTOTUNE.name)
    if not is_saved or not isinstance(store, PersistentCache):
        return tier
    if found is None:
        is_miss = tier.tier == PERSISTENT.name and not tier.is_rejected
        return dataclasses.replace(tier, note=why_no_entry(store, inv, key)) if is_miss else tier
    entry = store.load(key)
    # The entry may have been replaced since the answer was stored in memory.
    if entry is None or entry.config != to_data(found.config):
        return tier
    from ejkernel.ops.autotuner.store.saving import heuristic_since  # most programs import no tuner

    changed = text_of_differences(heuristic_since(kernel_of(inv), inv, found.config, entry))
    step = StepNote.stored_in(entry.measured)
    told = () if step is None else (step.in_words,)
    notes = (tier.note, changed, _measured(entry), *told, f"in {_place_of(entry, store)}", cases(entry.measured))
    return dataclasses.replace(tier, note="; ".join(filter(None, notes)))


def _measured(entry: StoredEntry) -> str:
    from ejkernel.ops.autotuner.trials.status import stored_in_brief  # most programs import no tuner

    found, _, unfinished = stored_in_brief(entry.measured, entry.speedup).partition(", ")
    words = {"-": "", "kept": "heuristic kept, ", "undecided": "undecided, the heuristic is kept, "}
    faster = words.get(found, f"{found} as fast as the heuristic's, ")
    rest = f"; its search is {unfinished}" if unfinished else ""
    return f"{faster}{'measured' if entry.measured else 'saved'} {entry.time}{rest}"


def _place_of(entry: StoredEntry, store: PersistentCache) -> str:
    if entry.path is not None:
        return str(entry.path)
    return next((str(layer) for layer in store.shared if entry in layer.find(entry.key)), "memory, not on disk")


def _label_of(
    inv: Invocation[Cfg, Out], key: ConfigKey | None, resolution: Resolution[Any] | None, prefix: str
) -> tuple[str | None, str]:
    if key is None or resolution is None:
        return None, "the call has no key" if key is None else "the call cannot run"
    if _returns_only_inputs(inv, resolution.config):
        return None, "each result of the call is one of its inputs, so no instruction can carry the label"
    return label(inv.op_id_v, key.call, prefix), ""


def _returns_only_inputs(inv: Invocation[Cfg, Out], config: object) -> bool:
    if inv.batch_sizes or inv.direction != "fwd":
        return False  # batched results are transposed and derived ones computed, so instructions produce them
    try:
        compute = inv.node.flat(Choice(config=config, platform=inv.platform))
        jaxpr = jax.make_jaxpr(compute)(*inv.argument_types).jaxpr
    except NameError as error:
        if not compat.tracing.needs_axis(error):
            raise
        return False  # a part of a program over several devices, whose collectives are instructions
    return all(out in jaxpr.invars for out in jaxpr.outvars)
