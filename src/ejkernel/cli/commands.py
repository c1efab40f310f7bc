# SPDX-License-Identifier: Apache-2.0
"""The commands as they are typed: options, help, and what does not go together. Nothing here imports JAX."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

FOLDER = click.Path(path_type=Path, file_okay=False)
FILE = click.Path(path_type=Path, dir_okay=False)


class _Seconds(click.FloatRange):
    """Seconds, of which "nan" is no number, though it is outside of no range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = float(super().convert(value, param, ctx))
        if math.isnan(found):
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return found


imports = click.option(
    "--import",
    "imports",
    multiple=True,
    metavar="MODULE",
    help="Module that makes kernels; repeatable. It is imported.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
read_cache = click.option("--cache", type=FOLDER, help="Folder to read; EJKERNEL_CACHE_DIR by default.")


@click.command()
@click.argument("target", metavar="[MODULE:FUNCTION|FILE]", required=False, default="")
@imports
@click.option("--from", "bundle", type=FOLDER, metavar="BUNDLE", help="Measure what was compiled elsewhere.")
@click.option("--missed", is_flag=True, help="Tune what was noted with EJKERNEL_NOTE_MISSES=1.")
@click.option("--shapes", type=FILE, metavar="FILE", help="Find one configuration for the calls of a file, by kernel.")
@click.option("--cache", type=FOLDER, help="Folder to save to; EJKERNEL_CACHE_DIR by default.")
@click.option("--budget", type=_Seconds(min=0, min_open=True), help="Seconds for each call's search.")
@click.option("--force", is_flag=True, help="Tune calls that were tuned before, too.")
@click.option(
    "--devices", type=click.IntRange(min=1), metavar="COUNT", help="How many GPUs tune side by side, 1 by default."
)
@click.option("--ray", metavar="ADDRESS", help="Tune on the workers of a Ray cluster: auto, HOST:PORT, or local.")
@click.option(
    "--compile-processes",
    type=click.IntRange(min=0),
    metavar="COUNT",
    help="Compile in so many processes, or in threads (0); for GPUs that are described, one a core by default.",
)
@click.option(
    "--mesh-devices",
    type=click.IntRange(min=1),
    metavar="COUNT",
    help="The program is for a mesh of so many devices, which need not be here.",
)
@click.option("--in-process", is_flag=True, help="Measure in this process: a crash ends the command.")
@click.option("--compile-only", is_flag=True, help="Compile for --target, measure nothing, and write --output.")
@click.option("--target", "device", default="here", metavar="DEVICE", help="What to compile for: here, or nvidia_h200.")
@click.option("--output", type=FOLDER, metavar="BUNDLE", help="The folder to write.")
@click.option("--dry-run", is_flag=True, help="Only list the calls, and which of them are tuned.")
@as_json
@click.option("--verbose", "-v", is_flag=True, help="Print the fate of every candidate.")
def tune(**options: Any) -> int:
    """Tune every kernel call in a JAX program, forward and backward.

    MODULE is a module's name, or the path of its file or folder: train:step, ./train.py:step. FUNCTION takes no
    arguments, and returns the program and its arguments: (callable, args) or (callable, args, kwargs). Arguments may
    be jax.ShapeDtypeStruct: the program is lowered, not run. The configurations are saved, and take effect the next
    time that the program starts.

    FILE is the text of a program that was lowered with EJKERNEL_OPS_STAMP=json, or such a program exported by
    jax.export. FILE and --missed are data: they import nothing, and name kernels, functions and types that were
    registered, by the modules that --import names; ejkernel's own are there. --from runs the machine code of a bundle:
    measure your own.

    --shapes takes calls that are to share a configuration, the one whose times have the least geometric mean: a line of
    JSON for each, such as {"kernel": "rms_norm", "args": ["bf16[4096,5120]", "bf16[5120]"], "weight": 2}.

    Of a program for several devices each call's part is tuned, on one device. With --mesh-devices they are found in a
    process that has so many devices of the CPU; make the mesh in FUNCTION, not where the module is imported.

    Candidates run in a worker process, which one that crashes or never returns takes with it; the command goes on.
    With --ray, the program is found and its calls are tuned by the workers of a Ray cluster, one device a call; they
    must be able to import it, such as in a job of Ray with a working directory.

    With --compile-only they are compiled here for a device that is elsewhere, and measured there with --from (and with
    the same --shapes, if they share a configuration).
    """
    named = [options[name] for name in ("target", "missed", "bundle", "shapes") if options[name]]
    if len(named) != 1 and named != [options["bundle"], options["shapes"]]:
        raise click.UsageError("give one of MODULE:FUNCTION, FILE, --missed, --shapes and --from.")
    device, output = options.pop("device"), options.pop("output")
    if options.pop("compile_only"):
        return _compile(options, device, output)
    if output is not None or device != "here":
        raise click.UsageError("--target and --output go with --compile-only.")
    options["devices"] = options["devices"] or 1
    if options["devices"] > 1 and options["in_process"]:
        raise click.UsageError("--devices does not go with --in-process: each device has a process of its own.")
    if options["ray"] and (options["in_process"] or options["devices"] > 1 or options["mesh_devices"]):
        raise click.UsageError("--ray does not go with --in-process, --devices and --mesh-devices.")
    if options["mesh_devices"] and (options["in_process"] or ":" not in options["target"]):
        raise click.UsageError("--mesh-devices is for MODULE:FUNCTION, and its calls are found in another process.")
    if not options["in_process"]:
        _leave_devices_alone()
    from ejkernel.cli.tune import TuneOptions, run_tune

    run_tune(TuneOptions(**options))
    return 0


def _compile(options: dict[str, Any], device: str, output: Path | None) -> int:
    if output is None or bool(options["target"]) == bool(options["shapes"]):
        raise click.UsageError("--compile-only needs MODULE:FUNCTION, or --shapes, and --output.")
    for name in ("cache", "budget", "force", "dry_run", "as_json", "verbose", "devices", "mesh_devices", "ray"):
        if options[name]:
            option = name.removeprefix("as_").replace("_", "-")
            raise click.UsageError(f"--{option} does not go with --compile-only, which measures and saves nothing.")
    if device != "here" and not options["in_process"]:
        _leave_devices_alone()
    from ejkernel.cli.compile import run_compile

    run_compile(options["target"], options["imports"], device, output, options["compile_processes"], options["shapes"])
    return 0


def _leave_devices_alone() -> None:
    """Leave the devices to the worker, in a process that is the command's."""
    # What is set before JAX's first use of a device holds for the whole process, and a test's is not ours alone.
    if click.get_current_context().obj.is_ours:
        from ejkernel import compat

        compat.leave_devices_alone()


def _share_devices() -> None:
    """Leave a GPU's memory to others, in a process that is the command's and runs nothing on it."""
    if click.get_current_context().obj.is_ours:
        from ejkernel import settings

        settings.share_device({})


@click.command()
@click.argument("target", metavar="[MODULE:FUNCTION|FILE]", required=False, default="")
@imports
@click.option("--missed", is_flag=True, help="Explain what was noted with EJKERNEL_NOTE_MISSES=1.")
@read_cache
@as_json
def explain(target: str, imports: tuple[str, ...], missed: bool, cache: Path | None, as_json: bool) -> int:
    """Say why each call of a program has the configuration that it has.

    MODULE:FUNCTION and FILE are what `ejkernel tune` takes. Every place that a configuration may come from is asked,
    in the order that a call asks them, down to the one that answers. Nothing is measured or saved.
    """
    if bool(target) == missed:
        raise click.UsageError("give one of MODULE:FUNCTION, FILE and --missed.")
    _share_devices()
    from ejkernel.cli.explain import run_explain

    run_explain(target, imports, missed=missed, cache=cache, as_json=as_json)
    return 0


@click.command()
@read_cache
@as_json
@click.option("--log", metavar="PREFIX", help="Print the last search of each call whose key or operation begins so.")
def show(cache: Path | None, as_json: bool, log: str | None) -> int:
    """List the configurations that were saved, with what was measured."""
    from ejkernel.cli.show import run_show

    return run_show(cache, as_json, log)


@click.command("list")
@imports
@as_json
def list_(imports: tuple[str, ...], as_json: bool) -> int:
    """List operations and implementations, and why one cannot run here.

    With --import, the kernels of that module too.
    """
    _share_devices()
    from ejkernel.cli.operations import run_list

    run_list(imports, as_json=as_json)
    return 0
