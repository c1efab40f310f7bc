# SPDX-License-Identifier: Apache-2.0
"""`ejkernel bench --op`: the implementations of one call side by side."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import click
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.cli import report
from ejkernel.cli.bench import BenchOptions, build_as_data, print_table, race, same_configurations
from ejkernel.cli.builds import Build, Loaded, build, of_mapping, prints_left_out
from ejkernel.cli.explain import PER_TOKEN, usual_chain
from ejkernel.cli.outcome import integers_in_words
from ejkernel.cli.peaks import Peak, cost_of, main_dtype, peak_of
from ejkernel.cli.programs import import_named, import_operations
from ejkernel.cli.rounds import Comparison, verdict
from ejkernel.cli.shapes import call_of_types
from ejkernel.cli.show import opened
from ejkernel.ops.config.policy import looking_only
from ejkernel.ops.core.hooks import reference_result
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel, kernel_of, overrides
from ejkernel.ops.core.types import Cost
from ejkernel.ops.execution.explain import Explanation, explain_call
from ejkernel.ops.operation import Operation
from ejkernel.ops.utils.fingerprint import device_fingerprint
from ejkernel.ops.utils.formatting import arguments, compact, duration
from ejkernel.ops.utils.meta import DEFAULT_PREFIX
from ejkernel.ops.utils.random_arrays import random_array

CHOSEN: Final = "chosen"  # the call without a request for an implementation
REFERENCE: Final = "reference"
_SLOWER: Final = "For this call, plain JAX is better: call it instead, or make it a candidate of the kernel."
# The call that computes the gradient of a scalar loss together with the loss, and another name of the loss per token.
_IN_TRAINING: Final = {"linear_cross_entropy": "linear_cross_entropy_gradients"}


@dataclasses.dataclass(kw_only=True)
class _Result:
    """The builds of a call, the chosen one last.

    Attributes:
        inv: The call.
        builds: The builds that ran.
        missing: The reason for each build that did not run.
        whys: The explanation of each call's configuration, by build.
        found: The times.
        peak: The peak of the device, if it is known.
        note: The measured call, if `--gradient` means another one.
    """

    inv: Invocation[Any, Any]
    builds: list[Build] = dataclasses.field(default_factory=list)
    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    whys: dict[str, list[Explanation]] = dataclasses.field(default_factory=dict)
    found: Comparison = dataclasses.field(init=False)
    peak: Peak | None = None
    note: str = ""

    @property
    def cost(self) -> Cost | None:
        """The work of all calls of the chosen build; `None` if a kernel does not define it."""
        costs = [cost_of(inv) for inv in self.builds[-1].calls]
        known = [cost for cost in costs if cost is not None]
        if not known or len(known) < len(costs):
            return None
        return Cost(flops=sum(cost.flops for cost in known), bytes=sum(cost.bytes for cost in known))

    def configurations(self, name: str) -> list[str]:
        """Return the configuration of each call of a build, with its source."""
        return [f"{compact(why.config)}, from {why.source}" for why in self.whys[name]]


def run_bench_op(options: BenchOptions, imports: Sequence[str]) -> None:
    """Run `ejkernel bench --op`."""
    store = None if options.cache is None else opened(options.cache)
    import_operations()
    import_named(imports)
    options, note = _as_in_a_program(options)
    inv = call_of_types(options.op, options.shapes, options.kwargs)
    _print(options, _compared(options, inv, usual_chain(store), note))


def _as_in_a_program(options: BenchOptions) -> tuple[BenchOptions, str]:
    """Return the options for the call that a program makes, and a sentence about it if it has another name."""
    name = options.op.partition("@")[0]
    if name in PER_TOKEN:
        return dataclasses.replace(options, op=PER_TOKEN[name]), ""
    call = _IN_TRAINING.get(name, name)
    if not options.gradient or call not in _IN_TRAINING.values():
        return options, ""
    others = ", ".join(one for one, kernel in PER_TOKEN.items() if _IN_TRAINING[kernel] == call)
    note = (
        f"A program that differentiates a mean or a sum of the losses makes this call, {call}: it returns the loss "
        f"with its gradients. For losses per token, pass --op {others} --gradient."
    )
    return dataclasses.replace(options, op=call, gradient=False), note


def _compared(options: BenchOptions, inv: Invocation[Any, Any], chain: Any, note: str) -> _Result:
    result = _Result(inv=inv, note=note)
    kernel = kernel_of(inv)
    if isinstance(kernel, Operation):
        refusals = kernel.refusals(inv).items()
        result.missing |= {name: why.removeprefix(f"implementation={name!r} ") for name, why in refusals}
    args, kwargs = kernel.example_inputs(inv, np.random.default_rng(0))
    for name, value in _functions(kernel, inv, kwargs):
        step = jax.jit(_gradient(value, args) if options.gradient else value)
        try:
            made = build(name, Loaded(f"{options.op} ({name})", step, tuple(args), {}), chain)
        except click.ClickException as error:  # e.g. an implementation without a gradient
            if name == CHOSEN:
                raise
            result.missing[name] = error.message.splitlines()[0]
            continue
        with looking_only():
            whys = [explain_call(chain, inv, DEFAULT_PREFIX) for inv in made.calls]
        if name not in (CHOSEN, REFERENCE) and same_configurations(whys, result.whys[CHOSEN]):
            result.missing[name] = "the same program as chosen"
            continue
        result.builds.append(made)
        result.whys[name] = whys
    result.builds.append(result.builds.pop(0))  # the chosen one is built first and shown last
    result.peak = peak_of(device_fingerprint(), main_dtype(inv), measure=options.measure_peak)
    with prints_left_out():
        result.found = race(options, result.builds)
    return result


def _functions(
    kernel: Kernel[Any, Any], inv: Invocation[Any, Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the functions of the positional arguments to compare by name, the chosen one first."""
    yield CHOSEN, functools.partial(kernel, **kwargs)
    if overrides(kernel, "reference"):
        yield REFERENCE, lambda *args: reference_result(kernel, args, kwargs)
    if isinstance(kernel, Operation):
        for name in kernel.able(inv):
            yield name, functools.partial(kernel, **{**kwargs, "implementation": name})


def _gradient(function: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any]:
    """Return the gradient of a function's floating-point arguments, for random cotangents."""
    rng = np.random.default_rng(1)
    outputs = jax.tree.map(lambda like: random_array(like, rng), jax.eval_shape(function, *args))
    places = tuple(i for i, arg in enumerate(args) if arg is not None and jnp.issubdtype(arg.dtype, jnp.inexact))

    def loss(*args: Any) -> Any:
        results = jax.tree.leaves(function(*args))
        pairs = zip(results, jax.tree.leaves(outputs), strict=True)
        return sum(jnp.sum(out * cotangent) for out, cotangent in pairs if jnp.issubdtype(out.dtype, jnp.inexact))

    return jax.grad(loss, argnums=places)


def _print(options: BenchOptions, result: _Result) -> None:
    found, cost, peak = result.found, result.cost, result.peak
    if options.as_json:
        report.echo_json(_as_data(options, result))
        return
    click.echo(report.wrapped(f"{result.inv.op_id_v}  {arguments(result.inv.description)}"))
    more: dict[str, Callable[[Build], str]] = {}
    if cost is not None:
        more["TFLOP/s"] = lambda each: f"{cost.flops / found.seconds[each.name] / 1e12:.3g}"
        more["GB/s"] = lambda each: f"{cost.bytes / found.seconds[each.name] / 1e9:.3g}"
        if peak is not None:
            more["of roofline"] = lambda each: f"{peak.seconds(cost) / found.seconds[each.name]:.0%}"
    more["configuration"] = lambda each: "; ".join(result.configurations(each.name)) or "-"
    print_table(options, result.builds, found, result.missing, more)
    if REFERENCE in found.over:
        click.echo(
            report.wrapped(verdict("the chosen program", "the reference", found.over[REFERENCE], advice=_SLOWER))
        )
    click.echo(report.wrapped(_roofline(cost, peak)))
    if guessed := integers_in_words(result.inv):
        click.echo(report.wrapped(f"Inputs: {guessed}"))
    for sentence in filter(None, (of_mapping(result.builds), result.note)):
        click.echo(report.wrapped(sentence))


def _roofline(cost: Cost | None, peak: Peak | None) -> str:
    """Return a sentence about what limits the call on this device."""
    if cost is None or cost.bytes <= 0:
        return "The kernel defines no cost of this call, so there is no roofline."
    intensity = cost.flops / cost.bytes
    if peak is None:
        return f"{intensity:.3g} FLOP per byte. The peak of this device is not known; --measure-peak measures it."
    most, limit = peak.attainable(intensity), peak.limit(intensity)
    seconds = duration(peak.seconds(cost))
    return (
        f"At {intensity:.3g} FLOP per byte, the call is limited by {limit}: at most {most:.3g} TFLOP/s, or {seconds}. "
        f"Peak in {peak.in_words}."
    )


def _as_data(options: BenchOptions, result: _Result) -> dict[str, Any]:
    return {
        "op": result.inv.op_id_v,
        "arguments": arguments(result.inv.description),
        "device": device_fingerprint(),
        "rounds": result.found.rounds,
        "reference": CHOSEN,
        "flops": None if result.cost is None else result.cost.flops,
        "bytes": None if result.cost is None else result.cost.bytes,
        "peak": None if result.peak is None else dataclasses.asdict(result.peak),
        "builds": [
            build_as_data(options, each, result.found) | {"configurations": result.configurations(each.name)}
            for each in result.builds
        ],
        "missing": result.missing,
        "note": result.note,
    }
