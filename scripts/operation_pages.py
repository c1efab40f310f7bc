# SPDX-License-Identifier: Apache-2.0
"""Write the support tables of `docs/operations/`, by asking every implementation about the calls below, and signatures.

    python scripts/operation_pages.py [--check]

A page has a table between two comments for each function that it documents. A cell says whether an implementation runs
a call: "yes", "forward" (another implementation computes the gradient), or "-". The signatures are for readers of the
files; the site adds the docstrings. `--check` only compares;
`tests/test_operation_pages.py` does the same.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel import modules
from ejkernel.ops import Invocation
from ejkernel.ops.execution.discovery import discover

PAGES = Path(__file__).resolve().parents[1] / "docs" / "operations"
BEGIN, END = "<!-- support: written by scripts/operation_pages.py -->", "<!-- end of support -->"
SIGNATURE, END_OF_SIGNATURE = "<!-- signature: written by scripts/operation_pages.py -->", "<!-- end of signature -->"

DEVICES = {
    "NVIDIA H100, H200": "gpu:nvidia_h200",
    "NVIDIA A100": "gpu:nvidia_a100_sxm4_80gb",
    "NVIDIA B200": "gpu:nvidia_b200",
    "TPU v5e, v6e": "tpu:tpu_v6_lite",
    "CPU": "cpu:any",
}
DTYPES = ("bfloat16", "float16", "float32")

Built = tuple[tuple[Any, ...], dict[str, Any]]


class Page(NamedTuple):
    """The calls that a page's table asks about.

    Attributes:
        function: The public function.
        plain: Its plain call, by dtype.
        features: More calls, by name; each adds one feature to the plain call.
        special: Options of the builders for implementations that do not run the plain call on any device.
        has_gradient: Whether the function has a gradient.
    """

    function: Callable[..., Any]
    plain: Callable[..., Built]
    features: Mapping[str, Callable[..., Built]]
    special: Mapping[str, Any] = {}
    has_gradient: bool = True


def _array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _arrays(dtype: str, arrays: Mapping[str, tuple[Any, ...]] | None) -> dict[str, Any]:
    """Return optional arrays by name, given their dtypes (empty: that of the call) and shapes."""
    return {name: _array(kind or dtype, *shape) for name, (kind, *shape) in (arrays or {}).items()}


def _attention(
    dtype: str,
    *,
    dim: int = 128,
    value_dim: int | None = None,
    groups: int = 4,
    arrays: Any = None,
    packed: bool = False,
    **options: Any,
) -> Built:
    """Return a call of `[2, 1024, 8, dim]`; `packed` adds segment ids."""
    query, key = _array(dtype, 2, 1024, 8, dim), _array(dtype, 2, 1024, groups, dim)
    more = _arrays(dtype, {**({"segment_ids": ("int32", 2, 1024)} if packed else {}), **(arrays or {})})
    return (query, key, _array(dtype, 2, 1024, groups, value_dim or dim)), options | more


def _with_dropout(dtype: str, **given: Any) -> Built:
    args, options = _attention(dtype, dropout_rate=0.1, **given)
    return args, options | {"dropout_key": jax.eval_shape(lambda: jax.random.key(0))}


def _grouped(dtype: str, *, arrays: Any = None, **options: Any) -> Built:
    args = _array(dtype, 4096, 1024), _array(dtype, 8, 1024, 1024), _array("int32", 8)
    return args, options | _arrays(dtype, arrays)


def _quantized_groups(
    dtype: str, *, lhs: str = "float8_e4m3fn", block: int | None = None, rows: int = 4096, **options: Any
) -> Built:
    """Return a grouped product of quantised operands; `lhs=""` are rows in `dtype` without scales."""
    args = _array(dtype, rows, 1024), *_grouped(dtype)[0][1:]
    left = jax.eval_shape(functools.partial(modules.quantize, dtype=lhs or "int8", block=block), args[0])
    matrix: dict[str, Any] = {"dtype": lhs or "int8", "block": block, "axis": -1 if block is None else (1, 2)}
    matrices = jax.eval_shape(functools.partial(modules.quantize, **matrix), args[1])
    out = {"preferred_element_type": dtype, "transpose_rhs": True}
    return (left if lhs else args[0], matrices, args[2]), out | options


def _wgrad(dtype: str, **options: Any) -> Built:
    return (_array(dtype, 4096, 1024), _array(dtype, 4096, 1024), _array("int32", 8)), options


def _loss(dtype: str, *, arrays: Any = None, **options: Any) -> Built:
    weight = (32768, 1024) if options.get("transpose_weight") else (1024, 32768)
    args = _array(dtype, 4096, 1024), _array(dtype, *weight), _array("int32", 4096)
    return args, options | _arrays(dtype, arrays)


def _paged(
    dtype: str, *, cache: str = "", tokens: int = 64, dim: int = 128, kinds: int = 2, arrays: Any = None, **options: Any
) -> Built:
    """Return a call of 64 sequences; `kinds=1`: with one KV head without values."""
    pages = _array(cache or dtype, 4096, 16, 8 if kinds == 2 else 1, kinds, dim)
    integers = (_array("int32", *shape) for shape in ((64, 64), (65,), (64,)))
    return (_array(dtype, tokens, 32, dim), pages, *integers), options | _arrays(dtype, arrays)


def _quantized(
    dtype: str,
    *,
    x: str = "float8_e4m3fn",
    w: str = "float8_e4m3fn",
    scales: tuple[tuple[int, ...], ...] = ((4096, 1), (2048, 1)),
    transpose_w: bool = True,
    rows: int = 4096,
    **options: Any,
) -> Built:
    """Return a product of rows, of 1,024 and 2,048 columns; `x=""` is an operand in `dtype` without scales."""
    matrix = (2048, 1024) if transpose_w else (1024, 2048)
    own = {} if not x else {"x_scale": _array("float32", *scales[0])}
    own |= {"w_scale": _array("float32", *(scales[1] if transpose_w else scales[1][::-1]))}
    result = {} if "quantize" in options else {"preferred_element_type": dtype}
    out = {"transpose_w": transpose_w, **result, **options}
    return (_array(x or dtype, rows, 1024), _array(w, *matrix)), own | out


def _rows(dtype: str, vectors: int, *, dim: int = 4096, weight: str = "", residual: bool = False) -> Built:
    rows = _array(dtype, 8192, dim)
    return (rows, *[_array(weight or dtype, dim)] * vectors), {"residual": rows} if residual else {}


def _norm_features(vectors: int) -> dict[str, Callable[[str], Built]]:
    rows = functools.partial(_rows, vectors=vectors)
    return {
        "`residual`": functools.partial(rows, residual=True),
        "float32 weights with bfloat16 rows": functools.partial(rows, weight="float32"),
        "rows of 128": functools.partial(rows, dim=128),
        "rows of 16,384": functools.partial(rows, dim=16384),
        "rows of 1,001": functools.partial(rows, dim=1001),
    }


def _variants(build: Callable[..., Built], options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {name: functools.partial(build, **given) for name, given in options.items()}


_LOSS_OPTIONS: dict[str, dict[str, Any]] = {
    "`bias`": {"arrays": {"bias": ("", 32768)}},
    "`logits_soft_cap`": {"logits_soft_cap": 30.0},
    '`precision="highest"`': {"precision": "highest"},
}

CALLS: dict[str, Page] = {
    "flash_attention": Page(
        modules.flash_attention,
        _attention,
        {
            **_variants(
                _attention,
                {
                    "`causal`": {"causal": True},
                    "as many key heads as query heads": {"groups": 8},
                    "`head_dim` of 64": {"dim": 64},
                    "`head_dim` of 256": {"dim": 256},
                    "`head_dim` of 192, values of 128": {"dim": 192, "value_dim": 128},
                    "`head_dim` of 80": {"dim": 80},
                    "`head_dim` of 512": {"dim": 512},
                    "`bias`, with its gradient": {"arrays": {"bias": ("", 1, 8, 1024, 1024)}},
                    "`attention_mask`": {"arrays": {"attention_mask": ("bool", 2, 1, 1024, 1024)}},
                    "`segment_ids`": {"arrays": {"segment_ids": ("int32", 2, 1024)}},
                    "`query_lengths`, `key_lengths`": {
                        "arrays": {"query_lengths": ("int32", 2), "key_lengths": ("int32", 2)}
                    },
                    "`sinks`": {"arrays": {"sinks": ("float32", 8)}},
                    "`sliding_window`, causal": {"causal": True, "sliding_window": 256},
                    "`sliding_window`, both sides": {"sliding_window": (256, 256)},
                    "`logits_soft_cap`": {"logits_soft_cap": 50.0},
                    "`return_lse`, with its gradient": {"return_lse": True},
                    "`deterministic`": {"deterministic": True},
                    '`precision="highest"`': {"precision": "highest"},
                },
            ),
            "`dropout_rate`": _with_dropout,
        },
        {"packed": True},
    ),
    "grouped_matmul": Page(
        modules.grouped_matmul,
        _grouped,
        _variants(
            _grouped,
            {
                "`transpose_rhs`": {"transpose_rhs": True},
                "`activation`": {"activation": "silu"},
                "`activation` and `gate`": {"activation": "silu", "arrays": {"gate": ("", 8, 1024, 1024)}},
                "`row_scale`": {"arrays": {"row_scale": ("float32", 4096)}},
                "`preferred_element_type=float32`": {"preferred_element_type": jnp.float32},
                "`first_group`": {"first_group": 1},
                '`precision="highest"`': {"precision": "highest"},
            },
        )
        | _variants(
            _quantized_groups,
            {
                "`Quantized` operands, `float8_e4m3fn`": {},
                "`Quantized` operands, `int8`": {"lhs": "int8"},
                "`Quantized` operands, 1x128 by 128x128 blocks": {"block": 128},
                "512 rows for each group in bfloat16, `Quantized` matrices": {"lhs": ""},
                "64 rows for each group in bfloat16, `Quantized` matrices": {"lhs": "", "rows": 512},
                "the same, `activation`": {"lhs": "", "rows": 512, "activation": "silu"},
            },
        ),
    ),
    "grouped_matmul_wgrad": Page(
        modules.grouped_matmul_wgrad,
        _wgrad,
        _variants(
            _wgrad,
            {
                "`preferred_element_type=float32`": {"preferred_element_type": jnp.float32},
                '`precision="highest"`': {"precision": "highest"},
            },
        ),
    ),
    "linear_cross_entropy": Page(
        modules.linear_cross_entropy,
        _loss,
        _variants(
            _loss,
            {
                **_LOSS_OPTIONS,
                "`transpose_weight`": {"transpose_weight": True},
                "`token_weights`": {"arrays": {"token_weights": ("float32", 4096)}},
                '`reduction="none"`': {"reduction": "none"},
                "`label_smoothing`": {"label_smoothing": 0.1},
                "`z_loss`": {"z_loss": 1e-4},
                "`return_lse`, `return_accuracy`": {"return_lse": True, "return_accuracy": True},
            },
        ),
    ),
    "token_log_probs": Page(
        modules.token_log_probs,
        _loss,
        _variants(
            _loss,
            {
                **_LOSS_OPTIONS,
                "`temperature`": {"temperature": 0.8},
                "`return_entropy`": {"return_entropy": True},
            },
        ),
    ),
    "paged_attention": Page(
        modules.paged_attention,
        _paged,
        _variants(
            _paged,
            {
                "prefill of 4,096 tokens": {"tokens": 4096},
                "`head_dim` of 64": {"dim": 64},
                "`head_dim` of 80": {"dim": 80},
                "`head_dim` of 256": {"dim": 256},
                "`value_dim` (latent attention)": {"dim": 576, "kinds": 1, "value_dim": 512},
                "int8 cache": {"cache": "int8", "k_scale": 0.02, "v_scale": 0.02},
                "float8_e4m3fn cache": {"cache": "float8_e4m3fn"},
                "`sliding_window`": {"sliding_window": 1024},
                "`logits_soft_cap`": {"logits_soft_cap": 30.0},
                "`sinks`": {"arrays": {"sinks": ("float32", 32)}},
                "`return_lse`": {"return_lse": True},
            },
        ),
        has_gradient=False,
    ),
    "quantized_matmul": Page(
        modules.quantized_matmul,
        _quantized,
        _variants(
            _quantized,
            {
                "`float8_e5m2` by `float8_e4m3fn`": {"x": "float8_e5m2"},
                "`int8`": {"x": "int8", "w": "int8"},
                "`float8_e4m3fn` by `int8`": {"w": "int8"},
                "one scale for each array": {"scales": ((1, 1), (1, 1))},
                "1x128 by 128x128 blocks": {"scales": ((4096, 8), (16, 8))},
                "1x128 by 1x128 blocks": {"scales": ((4096, 8), (2048, 8))},
                "other blocks along `k`": {"scales": ((4096, 16), (2048, 16))},
                "rows in 16 or 32 bits": {"x": ""},
                "64 rows in bfloat16": {"x": "", "rows": 64},
                "64 rows in bfloat16, an activation": {"x": "", "rows": 64, "activation": "silu"},
                "`w` as `[k, n]`": {"transpose_w": False},
                '`accumulation="fast"`': {"accumulation": "fast"},
                "an activation": {"activation": "silu"},
                "an activation in 8 bits": {"activation": "silu", "quantize": "float8_e4m3fn"},
                "the same, 1x128 by 128x128 blocks": {
                    "activation": "silu",
                    "quantize": "float8_e4m3fn",
                    "scales": ((4096, 8), (16, 8)),
                },
            },
        ),
        has_gradient=False,
    ),
    "rms_norm": Page(modules.rms_norm, functools.partial(_rows, vectors=1), _norm_features(1)),
    "layer_norm": Page(modules.layer_norm, functools.partial(_rows, vectors=2), _norm_features(2)),
}


class Table:
    """The support table of one page."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._calls: dict[Any, list[Invocation[Any, Any]]] = {}
        kernel: Any = self._called("", "bfloat16", special=False)[0].kernel
        self.names = list(kernel.implementations)
        self._homes = {name: self._home(name) for name in self.names}

    def __str__(self) -> str:
        """Return it as Markdown."""
        lines = [f"| call | {' | '.join(f'`{name}`' for name in self.names)} |", f"|---|{'---|' * len(self.names)}"]
        lines += [self._line(name, [self._on(one, device) for one in self.names]) for name, device in DEVICES.items()]
        lines += [self._line(dtype, [self._cell("", name, dtype) for name in self.names]) for dtype in DTYPES]
        lines += [self._line(name, [self._cell(name, one) for one in self.names]) for name in self._page.features]
        return "\n".join(lines)

    @staticmethod
    def _line(label: str, cells: Sequence[str]) -> str:
        return f"| {label} | {' | '.join(cells)} |"

    def _home(self, name: str) -> tuple[str, str, bool]:
        """Return the device and dtype for which an implementation is asked, and whether with the special options."""
        specials = (False, True) if self._page.special else (False,)
        places = [(device, dtype, special) for special in specials for device in DEVICES.values() for dtype in DTYPES]
        return max(places, key=lambda place: _RANK[self._support("", name, *place)])

    def _on(self, name: str, device: str) -> str:
        special = self._homes[name][2]
        return max((self._support("", name, device, dtype, special) for dtype in DTYPES), key=_RANK.__getitem__)

    def _cell(self, label: str, name: str, dtype: str = "") -> str:
        device, usual, special = self._homes[name]
        return self._support(label, name, device, dtype or usual, special)

    def _support(self, label: str, name: str, device: str, dtype: str, special: bool) -> str:
        """Return whether an implementation runs a call on a device: `yes`, `forward` or `-`."""
        runs = [_runs(inv, name, device) for inv in self._called(label, dtype, special=special)]
        return "yes" if all(runs) else "forward" if runs[0] else "-"

    def _called(self, label: str, dtype: str, *, special: bool) -> list[Invocation[Any, Any]]:
        """Return the calls of the public function and of its gradient; the plain ones without a label."""
        key = label, dtype, special
        if key not in self._calls:
            build = self._page.features[label] if label else self._page.plain
            given = self._page.special if special else {}
            made = build(dtype, **given)
            self._calls[key] = _calls_of(self._page.function, *made, has_gradient=self._page.has_gradient)
        return self._calls[key]


_RANK = {"-": 0, "forward": 1, "yes": 2}


def _calls_of(
    function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], *, has_gradient: bool = True
) -> list[Invocation[Any, Any]]:
    """Return the calls of `function`, and of its gradient for all arrays of numbers if it has one."""
    arrays: dict[Any, Any] = dict(enumerate(args))
    arrays |= {name: value for name, value in options.items() if isinstance(value, jax.ShapeDtypeStruct)}
    static = {name: value for name, value in options.items() if name not in arrays}
    floats = [
        name
        for name, array in arrays.items()
        if isinstance(array, jax.ShapeDtypeStruct) and jnp.issubdtype(array.dtype, jnp.floating)
    ]

    def total(*wanted: jax.Array) -> jax.Array:
        given = others | dict(zip(floats, wanted, strict=True))
        positional = [given.pop(number) for number in range(len(args))]
        found = function(*positional, **given, **static)
        return functools.reduce(jnp.add, (jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(found)))

    def gradient(others_given: Sequence[jax.Array], *wanted: jax.Array) -> Any:
        others.update(zip(names, others_given, strict=True))
        return jax.grad(total, tuple(range(len(wanted))))(*wanted) if has_gradient and wanted else total(*wanted)

    others: dict[Any, Any] = {}
    names = [name for name in arrays if name not in floats]
    return discover(gradient, [arrays[name] for name in names], *(arrays[name] for name in floats))


def _runs(inv: Invocation[Any, Any], name: str, device: str) -> bool:
    kernel: Any = inv.kernel
    platform = device.partition(":")[0]
    if name not in kernel.implementations or kernel.implementations.elsewhere(name, platform):
        return False
    call = dataclasses.replace(kernel.call_of(inv), platform=platform, device_fingerprint=device)
    return kernel.implementations.unsupported(name, call) is None


def written(text: str, name: str) -> str:
    """Return the text of a page with tables and signatures up to date; `name` is that of the file without `.md`."""
    operations = [function for function in functions_of(text) if function in CALLS]  # others are helpers
    blocks = iter(operations)

    def block(_: re.Match[str]) -> str:
        return f"{BEGIN}\n\n{Table(CALLS[next(blocks)])}\n\n{END}"

    made, count = re.subn(f"{re.escape(BEGIN)}.*?{re.escape(END)}", block, text, flags=re.DOTALL)
    if count != len(operations):
        raise SystemExit(f"{name}.md must have one support table for each operation that it documents.")
    old = rf"(?:{re.escape(SIGNATURE)}(?:(?!{SIGNATURE}).)*?{re.escape(END_OF_SIGNATURE)}\n\n)?"
    docstring = r"^<!-- ::: ejkernel\.modules\.(\w+)\.(\w+) -->$"
    return re.sub(old + docstring, _signature, made, flags=re.DOTALL | re.MULTILINE)


def _signature(place: re.Match[str]) -> str:
    """Return the signature of a function as in its source, with a link to the docstring, before its docstring's line.

    That line is a comment in the file; the site shows the docstring there (`site_files.py`).
    """
    module, name = place[1], place[2]
    docstring = f"<!-- ::: ejkernel.modules.{module}.{name} -->"
    public = getattr(importlib.import_module(f"ejkernel.modules.{module}"), name)
    file = Path(inspect.getfile(inspect.unwrap(public)))
    source = file.read_text(encoding="utf-8")
    defined = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not defined:  # a class
        return docstring
    function = defined[-1]  # after its overloads
    header = "\n".join(source.splitlines()[function.lineno - 1 : function.body[0].lineno - 1]).removesuffix(":")
    where = f"Its [docstring](../../{file.relative_to(PAGES.parents[1]).as_posix()}) describes results and errors."
    listed = "\n".join(f"- {line}" for line in _arguments(public))
    return f"{SIGNATURE}\n\n```python\n{header}\n```\n\n{listed}\n\n{where}\n\n{END_OF_SIGNATURE}\n\n{docstring}"


def _arguments(function: Callable[..., Any]) -> list[str]:
    """Return the descriptions of the arguments from a docstring, one line each."""
    section = (inspect.getdoc(function) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    found: list[str] = []
    for line in section.splitlines():
        if line[4:5] == " ":  # continues the line before
            found[-1] += f" {line.strip()}"
        elif line.strip():
            names, _, text = line.strip().partition(": ")
            found.append(", ".join(f"`{name}`" for name in names.split(", ")) + f": {text}")
    return found


def functions_of(text: str) -> list[str]:
    """Return the operations that a page documents, in order."""
    documented = re.findall(r"^<!-- ::: ejkernel\.modules\.\w+\.(\w+) -->$", text, re.MULTILINE)
    return [name for name in documented if name in CALLS]


def main() -> int:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page differs")
    check = parser.parse_args().check
    differs = []
    for path in sorted(PAGES.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        made = written(text, path.stem)
        if made != text:
            differs.append(path.name)
            if not check:
                path.write_text(made, encoding="utf-8")
    print(f"{'different' if check else 'written'}: {', '.join(differs) or 'none'}")
    return 1 if check and differs else 0


if __name__ == "__main__":
    sys.exit(main())
