# SPDX-License-Identifier: Apache-2.0
"""`ejkernel explain`: the source of each call's configuration. `ejkernel list`: implementations, and where they run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from ejkernel.cli import report
from ejkernel.cli.programs import import_named, import_operations, import_users, with_cache
from ejkernel.cli.show import begins, none_begins, opened
from ejkernel.cli.sources import Source, find_on
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.autotuner.trials.status import SearchState
from ejkernel.ops.config.cache import AUTOTUNE, MEMORY, PERSISTENT, SHARED, SHIPPED, ConfigCache
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.kernel import Kernel, living_kernels, overrides, run_forms
from ejkernel.ops.core.types import ConfigKey
from ejkernel.ops.errors import ConfigError, TuningError
from ejkernel.ops.execution.executor import default_executor
from ejkernel.ops.execution.explain import Explanation, explain_call
from ejkernel.ops.operation import Operation
from ejkernel.ops.utils.fingerprint import name_of_device
from ejkernel.ops.utils.formatting import counted
from ejkernel.ops.utils.messages.names import did_you_mean
from ejkernel.ops.utils.meta import DEFAULT_PREFIX
from ejkernel.ops.utils.storage.serialize import to_data

_MEASURED = (PERSISTENT.name, SHIPPED.name, SHARED.name, AUTOTUNE.name, MEMORY.name)
#: Functions for losses per token, and the operation that each runs.
PER_TOKEN = {"token_log_probs": "linear_cross_entropy"}
_NAMES = (
    "token_log_probs runs as linear_cross_entropy; linear_cross_entropy_gradients is that loss together with its "
    "gradients, under jax.grad."
)


def run_explain(
    target: str,
    imports: tuple[str, ...],
    *,
    missed: bool,
    cache: Path | None,
    as_json: bool,
    prefix: str = "",
    device: str = "here",
    mesh_devices: int | None = None,
    verbose: bool = False,
) -> None:
    """Run `ejkernel explain`.

    Args:
        target: The program as typed, MODULE:FUNCTION or a file.
        imports: Modules that define kernels.
        missed: Whether to explain the noted misses instead.
        cache: The folder to read.
        as_json: Whether to print JSON.
        prefix: The start of the key or operation of the calls to explain.
        device: Name of the target to explain the calls for.
        mesh_devices: As in `TuneOptions`.
        verbose: Whether each tier gets a line, also those that have no answer for the usual reason.
    """
    store, aim = opened(cache), Target.named(device)
    source = Source.of(target, imports, missed=store.path if missed else None)
    with contextlib.redirect_stdout(sys.stderr):  # keep the program's prints out of the result
        found = find_on(source, aim, mesh_devices)
        if mesh_devices is not None and source.program is not None:  # a worker has imported it
            import_users(source.program.module)
        # After the program's import, which may set the default executor.
        chooser = usual_chain(store if cache is not None else None)
        every = [explain_call(chooser, inv, DEFAULT_PREFIX) for inv in found.calls]
    explained = [why for why in every if begins(_key_of(why), prefix)]
    if every and not explained:
        raise none_begins(found.name, "call", [prefix], list(map(_key_of, every)))
    click.echo(report.found(found.name, found.calls, found.device), err=True)
    target_name = "" if device == "here" else device
    if as_json:
        report.echo_json([_as_data(why) for why in explained])
    elif explained:
        click.echo("\n\n".join(why.text(verbose=verbose, target=target_name) for why in explained))
    if found.counts:
        click.echo(found.counts, err=True)
    if found.empty and not found.calls:
        raise TuningError(found.empty)
    where = with_cache(target or "--missed", cache)
    click.echo(counts_in_words(explained, where, target_name), err=True)


def _key_of(why: Explanation) -> ConfigKey:
    """Return the key of a call; one that no key can name has its operation alone."""
    return why.key or ConfigKey(device="", op=why.op_id_v, call="")


def usual_chain(store: PersistentCache | None) -> Any:
    """Return a chain like the program's, with an empty memory, and with the entries of `store` if it is given."""
    usual = default_executor().chooser
    if not isinstance(usual, ConfigSelectorChain):
        return usual
    # `explain` describes a program at its start, but the usual chain has answers of this lowering in memory.
    chain: ConfigSelectorChain[Any, Any] = ConfigSelectorChain(
        ConfigCache(), usual.persistent if store is None else store, policy=usual.policy
    )
    return chain


def is_measured(why: Explanation) -> bool:
    """Return whether a call's configuration was measured, here or elsewhere."""
    return why.source in _MEASURED


def _as_data(why: Explanation) -> dict[str, Any]:
    return {
        "op": why.op_id_v,
        "arguments": why.arguments,
        "key": None if why.key is None else why.key.call,
        "device": None if why.key is None else why.key.device,
        "source": why.source,
        "config": None if why.resolution is None else to_data(why.runs),
        "label": why.label,
        "refusals": dict(why.refusals),
        "search": None if why.search is None else why.search.data(),
        "tiers": [
            {
                "tier": tier.tier,
                "note": tier.note,
                "config": None if tier.resolution is None else to_data(tier.resolution.config),
            }
            for tier in why.tiers
        ],
    }


def counts_in_words(explained: Sequence[Explanation], where: str, device: str = "") -> str:
    """Return how many calls have a saved configuration, and the commands for the other and the undecided calls.

    Args:
        explained: The calls.
        where: The program, for the commands.
        device: The device on which the commands measure, if it is not here.
    """
    found = [why for why in explained if is_measured(why)]
    undecided = sum(why.search is not None and why.search.state == SearchState.UNDECIDED for why in found)
    failed = sum(why.search is not None and why.search.state == SearchState.FAILED for why in explained)
    parts = [f"{len(found)} of {counted(len(explained), 'call')} with a saved configuration"]
    parts[0] += f" ({undecided} undecided)" if undecided else ""
    parts += [f"{counted(failed, 'search', 'searches')} failed"] if failed else []
    others = len(explained) - len(found) - failed
    which = "the others" if others > 1 else "the other"
    which = which if found or failed else "them" if others > 1 else "it"
    there = f"on {device}, " if device else ""
    parts += [f"{there}`ejkernel tune {where}` measures {which}"] if others > 0 else []
    parts += [f"`ejkernel tune {where} --undecided` measures undecided calls again"] if undecided else []
    return "; ".join(parts)


def run_list(imports: Sequence[str], prefix: str = "", *, as_json: bool, device: str = "here") -> None:
    """Run `ejkernel list` for a target, `device`, and for operations with names that start with `prefix`."""
    aim = Target.named(device).fingerprint
    rows = implementations_on(aim)
    import_named(imports)
    rows += [row for op, kernel in _kernels(ours=False) if imports for row in _rows_of(op, kernel, aim)]
    known = sorted({name.partition("@")[0] for name, *_ in rows} | set(PER_TOKEN))
    starts = (prefix, *(other for name, other in PER_TOKEN.items() if name.startswith(prefix)))
    rows = [row for row in rows if row[0].startswith(starts)]
    if not rows:
        raise ConfigError(f"no operation starts with {prefix!r}{_nearest(prefix, known)}")
    shown = {name for name, *_ in rows}
    published = [each for each in _published_on(aim) if each[0] in shown]
    if as_json:
        listed = [
            {"operation": op, "implementation": name, "source": source, "configurations": count}
            for op, name, source, count in published
        ]
        report.echo_json({"device": aim, "implementations": rows_as_data(rows), "published": listed})
        return
    click.echo(f"On {name_of_device(aim)}:", err=True)
    cells = [(name, one, "no" if reason else "yes", _in_brief(one, reason, aim)) for name, one, reason in rows]
    runs = "runs here" if device == "here" else "runs there"
    click.echo(report.table(("operation", "implementation", runs, "why not"), cells))
    for op, name, source, count in published:
        click.echo(f"{op}, {name}: {counted(count, 'configuration')} published in {source}")
    if shown & set(PER_TOKEN.values()):
        click.echo(report.wrapped(_NAMES), err=True)


def _nearest(prefix: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown operation."""
    found = did_you_mean(prefix.partition("@")[0], known)
    return found if found != "." else f"; the operations are {', '.join(known)}."


def _in_brief(implementation: str, reason: str, device: str) -> str:
    """Return a reason without the names of the implementation and the device, which stand beside it."""
    here = f", and this call is for {name_of_device(device)};"
    return reason.removeprefix(f"implementation={implementation!r} ").partition(here)[0]


def implementations_on(device: str) -> list[tuple[str, str, str]]:
    """Return `(operation, implementation, why not on this device)` for the operations of this package."""
    import_operations()
    return [row for _, kernel in _kernels(ours=True) for row in _rows_of(kernel.op_id, kernel, device)]


def rows_as_data(rows: Iterable[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """Return rows of `implementations_on` as data for JSON."""
    return [
        {"operation": name, "implementation": implementation, "runs_here": not reason, "reason": reason or None}
        for name, implementation, reason in rows
    ]


def _published_on(device: str) -> list[tuple[str, str, str, int]]:
    """Return operation, implementation, source and number of the configurations published for a device."""
    kernels = [kernel for _, kernel in _kernels(ours=True) if isinstance(kernel, Operation)]
    return [(kernel.op_id, *found) for kernel in kernels for found in kernel.published_on(device)]


def _rows_of(name: str, kernel: Kernel[Any, Any], device: str) -> list[tuple[str, str, str]]:
    """Return `(name, implementation, why not there)` per implementation, or per run form of a plain kernel."""
    if isinstance(kernel, Operation):
        return [(name, implementation, reason) for implementation, reason in kernel.reasons_on(device).items()]
    return [(name, form, "") for form in ["run"] * overrides(kernel, "run") + run_forms(kernel)]


def _kernels(*, ours: bool) -> list[tuple[str, Kernel[Any, Any]]]:
    """Return the kernels of this package, or all others, by versioned name; only the latest of each name."""
    return sorted(
        (op, kernels[0])
        for op, kernels in living_kernels().items()
        if f"{kernels[0].__module__}.".startswith("ejkernel.") is ours
    )
