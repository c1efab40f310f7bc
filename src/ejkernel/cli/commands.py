# SPDX-License-Identifier: Apache-2.0
"""Options and help of the commands, and checks of their combinations. This module does not import JAX."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

FOLDER = click.Path(path_type=Path, file_okay=False)
FILE = click.Path(path_type=Path, dir_okay=False)


class Group(click.Group):
    """A group that suggests a command for a misspelt name; Click does so since version 8.5."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command of the arguments.

        Raises:
            click.UsageError: The group has no such command.
        """
        name = args[0]
        if not ctx.resilient_parsing and not name.startswith("-") and self.get_command(ctx, name) is None:
            import difflib  # only for this message

            close = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
            ctx.fail(f"No such command {name!r}.{f' Did you mean {close[0]!r}?' if close else ''}")
        return super().resolve_command(ctx, args)


class _Seconds(click.FloatRange):
    """A range of seconds that also rejects "nan", which passes every range check."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            found = float(value)
        except (TypeError, ValueError):
            found = math.nan
        if math.isnan(found):
            self.fail(f"{value!r} is not a number of seconds, e.g. 60.", param, ctx)
        return float(super().convert(value, param, ctx))


def _targets(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the completions of --target."""
    del ctx, param
    names = ["here", *(file.name.partition(".")[0] for file in _package("data", "targets").iterdir())]
    return sorted(name for name in names if name.startswith(incomplete))


def _operations(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the completions of --op: the folders of operations, because importing them would take a second."""
    del ctx, param
    folders = _package("kernels").iterdir()
    names = (folder.name for folder in folders if folder.joinpath("operation.py").is_file())
    return sorted(name for name in names if name.startswith(incomplete))


def _package(*parts: str) -> Path:
    return Path(__file__).parents[1].joinpath(*parts)  # `importlib.resources` takes longer to import


imports = click.option(
    "--import",
    "imports",
    multiple=True,
    metavar="MODULE",
    help="Import this module, which defines kernels; repeatable.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
aim = click.option(
    "--target",
    "device",
    default="here",
    metavar="DEVICE",
    shell_complete=_targets,
    help="Device: here, nvidia_h100, nvidia_h200, tpu_v4, tpu_v5e, tpu_v5p, tpu_v6e or tpu7x.",
)
mesh_devices = click.option(
    "--mesh-devices",
    type=click.IntRange(min=1),
    metavar="COUNT",
    help="Number of devices of the program's mesh, which need not exist on this machine.",
)
read_cache = click.option(
    "--cache",
    type=FOLDER,
    help="Folder to read instead of EJKERNEL_CACHE_DIR and EJKERNEL_CACHE_LAYERS.",
)


@click.command()
@click.argument("target", metavar="[MODULE:FUNCTION|FILE]", required=False, default="")
@imports
@click.option("--from", "bundle", type=FOLDER, metavar="BUNDLE", help="Measure candidates compiled elsewhere.")
@click.option("--missed", is_flag=True, help="Tune the calls noted with EJKERNEL_NOTE_MISSES=1.")
@click.option("--shapes", type=FILE, metavar="FILE", help="Find one configuration per kernel for all calls of a file.")
@click.option("--cache", type=FOLDER, help="Folder to save to; EJKERNEL_CACHE_DIR by default.")
@click.option(
    "--budget", type=_Seconds(min=0, min_open=True), help="About so many seconds for each call, plus compiling."
)
@click.option(
    "--time",
    type=_Seconds(min=0, min_open=True),
    help="Seconds for all searches and the comparison of the step; the calls that take the most time come first.",
)
@click.option("--force", is_flag=True, help="Tune all calls from the start, also those already tuned or undecided.")
@click.option("--undecided", is_flag=True, help="Also tune the calls again whose search was undecided.")
@click.option(
    "--devices", type=click.IntRange(min=1), metavar="COUNT", help="Number of GPUs that tune in parallel; 1 by default."
)
@click.option("--ray", metavar="ADDRESS", help="Tune on the workers of a Ray cluster: auto, HOST:PORT, or local.")
@click.option(
    "--compile-processes",
    type=click.IntRange(min=0),
    metavar="COUNT",
    help="Number of compile processes, or 0 for threads; by default one per core for known GPUs, else 0.",
)
@mesh_devices
@click.option(
    "--check-step/--no-check-step",
    default=None,
    help="Whether to run the step with the new configurations and drop those that slow it; by default on CPUs.",
)
@click.option("--in-process", is_flag=True, help="Measure in this process: a crash ends the command.")
@click.option("--compile-only", is_flag=True, help="Compile for --target without measuring, and write --output.")
@click.option("--estimate", is_flag=True, help="Estimate the candidates for --target, a TPU, and measure nothing.")
@aim
@click.option("--output", type=FOLDER, metavar="BUNDLE", help="The output folder of --compile-only.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Only list the calls and whether they are tuned, or the candidates of --compile-only or --estimate.",
)
@as_json
@click.option("--verbose", "-v", is_flag=True, help="Print the status of every candidate.")
def tune(**options: Any) -> int:
    """Tune every kernel call in a JAX program, forward and backward.

    MODULE is the name of a module, or the path of its file or folder: train:step, ./train.py:step. FUNCTION takes no
    arguments and returns the program with its arguments: (callable, args) or (callable, args, kwargs). Arguments may be
    jax.ShapeDtypeStruct. The configurations are saved and take effect when the program next starts.

    A configuration that wins by itself may slow the whole step, above all on CPUs. At the end, the step therefore runs
    without and with the new configurations, and those that slow it are not kept. Random arrays stand in for types. This
    may take a quarter of the time of the searches, but at least a minute; with --time, the rest of that time.
    --check-step runs the step in other cases, too: if it has side effects, more than 1 GiB of random arrays, or takes
    long, and on a GPU.

    FILE is the text of a program lowered with EJKERNEL_OPS_STAMP=json, or such a program exported by jax.export. FILE
    and --missed are data and import nothing. They refer to kernels, functions and types of ejkernel and of the modules
    named by --import. --from runs the machine code of a bundle: measure only bundles that you trust.

    --shapes reads calls that share one configuration, the one with the least geometric mean of the times. Each line is
    a call in JSON, e.g. {"kernel": "rms_norm", "args": ["bf16[4096,5120]", "bf16[5120]"], "weight": 2}.

    In a program for several devices, the shard of each call is tuned on one device. With --mesh-devices, the calls are
    found in a process with that many CPU devices; create the mesh in FUNCTION, not at import.

    Candidates run in a worker process; a candidate that crashes or never returns costs only the worker, and the command
    continues. With --ray, the workers of a Ray cluster find and tune the calls, one device per call. They must be able
    to import the program, e.g. in a Ray job with a working directory.

    With --compile-only, candidates are compiled here for a device of another machine and measured there with --from
    (and with the same --shapes, if they share a configuration).

    With --estimate, Google's compiler simulates the candidates for a TPU, which need not exist on this machine. The
    estimates are stored beside the configurations. A later search on such a TPU measures the fastest first, and none
    with an estimate of 1.3 times the best or more. Estimates are never saved as measured.

    The exit status is 1 if a search failed, if a result could not be written, or if a call has no entry and nothing
    was found to save, e.g. because --budget ended every search early; the next run continues such searches.
    """
    named = [options[name] for name in ("target", "missed", "bundle", "shapes") if options[name]]
    if len(named) != 1 and named != [options["bundle"], options["shapes"]]:
        raise click.UsageError("pass exactly one of MODULE:FUNCTION, FILE, --missed, --shapes and --from.")
    if options["mesh_devices"] and (options["in_process"] or ":" not in options["target"]):
        raise click.UsageError("--mesh-devices requires MODULE:FUNCTION and cannot be used with --in-process.")
    device, output = options.pop("device"), options.pop("output")
    estimates, compile_only = options.pop("estimate"), options.pop("compile_only")
    if estimates and not compile_only:
        return _estimate(options, device, output)
    if compile_only:
        if estimates:
            raise click.UsageError("--estimate cannot be used with --compile-only; run one after the other.")
        return _compile(options, device, output)
    if output is not None or device != "here":
        raise click.UsageError(
            "--target and --output require --compile-only, and --target may also have --estimate: only a machine with "
            "the device measures. `ejkernel explain MODULE:FUNCTION --target DEVICE` lists the calls."
        )
    options["devices"] = options["devices"] or 1
    if options["devices"] > 1 and options["in_process"]:
        raise click.UsageError("--devices cannot be used with --in-process: each device needs its own process.")
    if options["ray"] and (options["in_process"] or options["devices"] > 1 or options["mesh_devices"]):
        raise click.UsageError("--ray cannot be used with --in-process, --devices or --mesh-devices.")
    _check_together(options)
    if not options["in_process"]:
        _leave_devices_alone()
    from ejkernel.cli.sources import TuneOptions
    from ejkernel.cli.tune import run_tune

    return run_tune(TuneOptions(**options))


def _check_together(options: dict[str, Any]) -> None:
    if options["time"] and (options["budget"] or options["ray"] or options["devices"] > 1):
        raise click.UsageError("--time cannot be used with --budget, --devices or --ray.")
    if options["check_step"] and ":" not in options["target"]:
        raise click.UsageError("--check-step requires MODULE:FUNCTION.")


def _compile(options: dict[str, Any], device: str, output: Path | None) -> int:
    if bool(options["target"]) == bool(options["shapes"]):
        raise click.UsageError("--compile-only needs either MODULE:FUNCTION or --shapes.")
    if output is None and not options["dry_run"]:
        raise click.UsageError("--compile-only needs --output, a folder for the bundle.")
    _check_unused(options, "--compile-only", "cache", *(() if options["dry_run"] else ("as_json",)))
    if device != "here" and not options["in_process"]:
        _leave_devices_alone()
    from ejkernel.cli.elsewhere import run_compile
    from ejkernel.cli.sources import TuneOptions

    run_compile(TuneOptions(**options), device, output or Path())  # a dry run writes nothing
    return 0


def _estimate(options: dict[str, Any], device: str, output: Path | None) -> int:
    if not (":" in options["target"] or options["shapes"]) or device == "here" or output is not None:
        raise click.UsageError("--estimate needs MODULE:FUNCTION or --shapes, and --target, and has no --output.")
    _check_unused(options, "--estimate")
    _leave_devices_alone()
    from ejkernel.cli.elsewhere import run_estimate
    from ejkernel.cli.sources import TuneOptions

    return run_estimate(TuneOptions(**options), device)


def _check_unused(options: dict[str, Any], by: str, *more: str) -> None:
    """Check that no option was given that a command without measurements ignores."""
    others = ("budget", "time", "force", "undecided", "devices", "ray", "check_step")
    for name in (*more, *others):
        if options[name]:
            option = name.removeprefix("as_").replace("_", "-")
            raise click.UsageError(f"--{option} cannot be used with {by}, which measures nothing.")


def _leave_devices_alone() -> None:
    """Keep this process from opening devices, which the worker needs."""
    # The setting holds for the whole process, so a test's process is left alone.
    if click.get_current_context().obj:
        from ejkernel import compat

        compat.settings.leave_devices_alone()


def _prepare_for(device: str) -> None:
    """Open no device of this machine if the command is about another one, or share its memory."""
    if device == "here":
        _share_devices()
    else:
        _leave_devices_alone()


def _share_devices() -> None:
    """Leave the GPU's memory to other processes: this command runs nothing on the GPU."""
    if click.get_current_context().obj:
        from ejkernel import settings

        settings.share_device({})


@click.command()
@click.argument("target", metavar="[MODULE:FUNCTION|FILE]", required=False, default="")
@click.argument("prefix", required=False, default="")
@imports
@click.option("--missed", is_flag=True, help="Explain the calls noted with EJKERNEL_NOTE_MISSES=1.")
@aim
@mesh_devices
@read_cache
@as_json
@click.option(
    "--verbose", "-v", is_flag=True, help="Print a line for every tier, also for those without an answer or not asked."
)
def explain(target: str, prefix: str, imports: tuple[str, ...], missed: bool, device: str, **options: Any) -> int:
    """Explain where each call of a program gets its configuration.

    MODULE:FUNCTION and FILE are as for `ejkernel tune`. PREFIX selects calls as in `ejkernel show`, e.g. by the start
    of an operation's name: ejkernel explain train:step flash.

    The command asks the tiers in the order that a call asks them, down to the first hit: cfg= of the call (override),
    overlays, the answer of all processes of a program (agreed), memory, saved entries (persistent), entries in the
    package for this device (shipped), updated copies of shared caches (shared), a search (autotune, only with
    EJKERNEL_ON_MISS=tune), entries to tune again (stale), entries in the package for a similar device (sister), the
    entry of the forward call, on TPUs configurations of others (published) and by a simulator (estimated), the
    heuristic. This command measures and saves nothing.

    With --target, the program of MODULE:FUNCTION is traced for that device, which need not be here. With
    --mesh-devices, it is traced for a mesh of that many such devices.
    """
    if missed and not prefix and ":" not in target:  # else it names a program
        target, prefix = "", target
    if bool(target) == missed:
        raise click.UsageError("pass exactly one of MODULE:FUNCTION, FILE and --missed.")
    for name, given in (("--target", device != "here"), ("--mesh-devices", options["mesh_devices"])):
        if given and ":" not in target:
            raise click.UsageError(f"{name} requires MODULE:FUNCTION.")
    _prepare_for(device)
    from ejkernel.cli.explain import run_explain

    run_explain(target, imports, prefix=prefix, missed=missed, device=device, **options)
    return 0


@click.command()
@click.argument("target", metavar="[MODULE:FUNCTION]", required=False, default="")
@click.option("--baseline", metavar="MODULE:FUNCTION", default="", help="The same step without ejkernel, to compare.")
@click.option(
    "--op",
    metavar="NAME",
    default="",
    shell_complete=_operations,
    help="Compare the implementations of this operation instead.",
)
@click.option("--shape", "shapes", metavar="TYPE", multiple=True, help="With --op: an argument, e.g. bf16[8,128].")
@click.option("--kwargs", metavar="JSON", help="With --op: keyword arguments, e.g. '{\"causal\": true}'.")
@click.option("--gradient", is_flag=True, help="With --op: measure the gradient.")
@click.option("--measure-peak", is_flag=True, help="With --op: measure the peak of this device, for the roofline.")
@imports
@click.option("--per-step", type=click.FloatRange(min=0, min_open=True), help="Tokens or examples in a step.")
@click.option("--unit", help="Unit of --per-step, e.g. tokens.")
@click.option("--rounds", type=click.IntRange(min=6), default=101, help="Most rounds; 101 by default.")
@click.option(
    "--seconds", type=_Seconds(min=0), default=30.0, help="Time for the rounds; 30 by default. Six rounds always run."
)
@read_cache
@as_json
def bench(imports: tuple[str, ...], **options: Any) -> int:
    """Compare a program's step tuned, untuned, and beside a baseline.

    MODULE:FUNCTION is as for `ejkernel tune`; here the step runs. A jax.ShapeDtypeStruct among its arguments becomes an
    array of random numbers, so return arrays if the time depends on their values.

    The untuned build uses the heuristics, the tuned one the saved configurations. The baseline is another function of
    the same form, e.g. the step in plain JAX. Each round runs one step of every build, in changing order. The figures
    are the medians of ratios within a round, with their 95 % interval.

    --op compares the implementations of one call, its reference in plain JAX, and the chosen configuration: ejkernel
    bench --op rms_norm --shape bf16[4096,5120] --shape bf16[5120]. --import names the module of other kernels.
    """
    if bool(options["target"]) == bool(options["op"]):
        raise click.UsageError("pass exactly one of MODULE:FUNCTION and --op.")
    if options["op"] and not options["shapes"]:
        raise click.UsageError("--op requires --shape for each array, e.g. --shape bf16[4,1024,8,64].")
    if options["op"] and options["baseline"]:
        raise click.UsageError("--baseline requires MODULE:FUNCTION; --op compares with the operation's reference.")
    of_op = any(options[name] for name in ("shapes", "gradient", "measure_peak")) or options["kwargs"] is not None
    if options["target"] and (of_op or imports):
        raise click.UsageError("--shape, --kwargs, --gradient, --measure-peak and --import require --op.")
    if options["unit"] and options["per_step"] is None:
        raise click.UsageError("--unit requires --per-step.")
    from ejkernel.cli import bench, bench_op

    given = bench.BenchOptions(**options | {"unit": options["unit"] or "items"})
    if given.op:
        bench_op.run_bench_op(given, imports)
    else:
        bench.run_bench(given)
    return 0


@click.command()
@click.argument("prefix", required=False, default="")
@read_cache
@as_json
@click.option(
    "--log",
    is_flag=False,
    flag_value="",
    default=None,
    metavar="[PREFIX]",
    help="Print the last search of each of these calls, with all candidates: ejkernel show NAME --log KEY.",
)
def show(prefix: str, cache: Path | None, as_json: bool, log: str | None) -> int:
    """List the saved configurations with their measurements.

    PREFIX is the start of a key, the start of the name of an operation, or NAME:KEY; without it, all are listed.
    Several operations may have calls with the same key. With --log, the last search of each call is printed instead.
    """
    from ejkernel.cli.show import run_show

    return run_show(cache, as_json, log, prefix)


@click.command("report")
@click.option(
    "--output", type=click.Path(path_type=Path), metavar="PATH", help="File to write, or folder for pictures."
)
@click.option("--format", "form", type=click.Choice(["html", "svg", "png"]), default="html", show_default=True)
@click.option(
    "--against", default="", metavar="FOLDER|previous", help="Compare with this cache, or with older searches."
)
@click.option("--device", metavar="NAME", default="", help="Only devices with this text in their name.")
@click.option("--against-device", metavar="NAME", default="", help="Compare with the calls of these devices.")
@click.option("--measure-peak", is_flag=True, help="Measure the peak of this device, for rooflines.")
@imports
@read_cache
@as_json
def report_(imports: tuple[str, ...], **options: Any) -> int:
    """Write an HTML page about all saved searches.

    The page shows each call before and after tuning, and for each search all candidates, the confirmation run, failures
    by reason, and the best time so far. It needs no network. With --json, the data is printed and no file is written.
    --format svg and png write its figures to a folder, for papers.

    --against compares two sets of searches: the calls of another cache are "before", those of --cache are "after". With
    --against previous, the newest search of each call is compared with the search before it. With --against-device, the
    same cache is compared on two devices.

    Throughput is shown for kernels that define a cost; name the modules of your own kernels with --import.
    """
    if options["against"] == "previous" and options["against_device"]:
        raise click.UsageError("--against previous compares searches of one device; leave out --against-device.")
    if options["as_json"] and (options["output"] is not None or options["form"] != "html"):
        raise click.UsageError("--json prints the data and writes no file; leave out --output and --format.")
    if options["form"] == "html" and options["output"] is not None and options["output"].is_dir():
        raise click.UsageError(f"--output {options['output']} is a folder; name a file, or use --format svg or png.")
    if not options["measure_peak"]:
        _share_devices()
    from ejkernel.cli.report_page import ReportOptions, run_report

    return run_report(ReportOptions(imports=imports, **options))


@click.command("list")
@click.argument("prefix", required=False, default="")
@imports
@aim
@as_json
def list_(prefix: str, imports: tuple[str, ...], device: str, as_json: bool) -> int:
    """List operations, implementations, and why some cannot run here.

    PREFIX is the start of the name of an operation; without it, all are listed.

    With --target, list why some cannot run on that device. With --import, also list the kernels of that module.
    """
    _prepare_for(device)
    from ejkernel.cli.explain import run_list

    run_list(imports, prefix, as_json=as_json, device=device)
    return 0


@click.command()
@as_json
def doctor(as_json: bool) -> int:
    """Print versions, devices, settings and caches, for a bug report.

    The exit status is 1 if a setting or a file of a cache cannot be used.
    """
    from ejkernel import settings

    environment = settings.environment()  # before the command sets variables itself
    _share_devices()
    from ejkernel.cli.doctor import run_doctor

    return run_doctor(environment, as_json=as_json)
