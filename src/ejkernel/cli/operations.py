# SPDX-License-Identifier: Apache-2.0
"""`ejkernel list`: operations, their implementations, and why some cannot run here."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import click

from ejkernel.cli import report
from ejkernel.cli.programs import import_users, look_here, module_named
from ejkernel.ops.core.kernel import Kernel, living_kernels, overrides, run_forms
from ejkernel.ops.operation import Operation
from ejkernel.ops.utils.fingerprint import device_fingerprint


def run_list(imports: Sequence[str], *, as_json: bool) -> None:
    """Run `ejkernel list`."""
    look_here()
    # Importing a module registers its operations, and `ops` imports no such module.
    importlib.import_module("ejkernel.modules")
    rows = [row for op, kernel in _kernels(ours=True) for row in _rows(kernel.op_id, kernel)]
    for module in map(module_named, imports):
        import_users(module)
    rows += [row for op, kernel in _kernels(ours=False) if imports for row in _rows(op, kernel)]
    device = device_fingerprint()
    if as_json:
        found = [
            {"operation": name, "implementation": implementation, "runs_here": not reason, "reason": reason or None}
            for name, implementation, reason in rows
        ]
        report.echo_json({"device": device, "implementations": found})
        return
    click.echo(f"On {device}:", err=True)
    cells = [(name, implementation, "no" if reason else "yes", reason) for name, implementation, reason in rows]
    click.echo(report.table(("operation", "implementation", "runs here", "why not"), cells))


def _rows(name: str, kernel: Kernel[Any, Any]) -> list[tuple[str, str, str]]:
    """Return `(name, implementation, why not here)` per implementation, or per run form of a plain kernel."""
    if isinstance(kernel, Operation):
        return [(name, implementation, reason) for implementation, reason in kernel.reasons_here().items()]
    return [(name, form, "") for form in ["run"] * overrides(kernel, "run") + run_forms(kernel)]


def _kernels(*, ours: bool) -> list[tuple[str, Kernel[Any, Any]]]:
    """Return the kernels of this package, or all others, by versioned name; only the latest of each name."""
    return sorted(
        (op, kernels[0])
        for op, kernels in living_kernels().items()
        if f"{kernels[0].__module__}.".startswith("ejkernel.") is ours
    )
