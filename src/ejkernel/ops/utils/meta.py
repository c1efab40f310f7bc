# SPDX-License-Identifier: Apache-2.0
"""Labels: the names under which calls appear in a program's text, and how to find them again.

A label is `<prefix>#<operation>@v<version>:<call key>`, for example `ejkernel_ops#matmul@v0:0123456789abcdef`. It is
the name of a frontend attribute on one result of the call. This changes neither the optimised program nor the compile
time; stamping the whole body would take four times as long to compile. With a fixed attribute name and the label as
its value, the outer of two nested kernels would lose its label. Labels are read from *lowered* text, since compilation
may drop them. Debug names are unsuitable, because JAX's compilation cache may return a program with other names.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import jax

from ejkernel import compat
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils import services
from ejkernel.ops.utils.fingerprint import device_fingerprint
from ejkernel.ops.utils.messages.names import check_argument
from ejkernel.ops.utils.values.signature import describe, digest_of

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_PREFIX = "ejkernel_ops"
SPLIT = f"{DEFAULT_PREFIX}.split"  # the attribute of a call that splits itself; its shards carry the labels

_PREFIX = r"[A-Za-z_][\w.\-]*"
_BODY = r"#(?P<op>[A-Za-z_][\w.\-]*@v(?P<version>\w[\w.]*)):(?P<key>[0-9a-f]{16})(?![0-9A-Za-z])"
LABEL_RE = re.compile(rf"(?P<prefix>{_PREFIX}){_BODY}")

# The search finds the part after the prefix first and then matches the prefix backwards. Searching from the prefix
# would take quadratic time in the length of a word, and words in a program's constants can be megabytes long.
_BODY_RE = re.compile(_BODY)
_PREFIX_RE = re.compile(rf"{_PREFIX}\Z")
_LONGEST_PREFIX = 256

# Names from `@label`: they appear in texts, but have no kernel to tune.
_scopes: set[str] = set()


@overload
def label(op_id: str, call_hash: str, prefix: str | None = None) -> str: ...
@overload
def label(op_id: str) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def label(op_id: str, call_hash: str | None = None, prefix: str | None = None) -> Any:
    """Format a label. With only a name, return a decorator that makes a function appear in a program's text.

    >>> label("matmul@v1", "0123456789abcdef")
    'ejkernel_ops#matmul@v1:0123456789abcdef'

    Args:
        op_id: The operation with its version, or the decorator's name for the function.
        call_hash: The key of the call; not validated.
        prefix: The prefix of the label; `ejkernel_ops` by default.
    """
    if call_hash is None:
        return _labelled(op_id)
    return f"{DEFAULT_PREFIX if prefix is None else prefix}#{op_id}:{call_hash}"


def _labelled(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    check_argument(isinstance(name, str), "label name", "a text", name)
    if not is_name(name):
        raise ConfigError(f"label name must be ASCII letters, digits, '_', '-' or '.', got {name!r}.")
    op_id = f"{name}@v0"
    _scopes.add(op_id)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def labelled(*args: P.args, **kwargs: P.kwargs) -> R:
            with jax.named_scope(name):
                out = function(*args, **kwargs)
            given = jax.tree.leaves((args, kwargs))
            try:
                described = [describe(args), describe(kwargs)]
            except TypeError:  # of a method's object or a NumPy array of texts; as nothing is tuned, JAX's arrays do
                described = [describe(leaf) for leaf in given if isinstance(leaf, jax.Array)]
            key = digest_of(json.dumps(described, sort_keys=True), 16)
            leaves, tree = jax.tree.flatten(out)
            stamped, _ = stamp(leaves, given, label(op_id, key), key)
            return jax.tree.unflatten(tree, stamped)  # type: ignore[no-any-return]

        return labelled

    return decorate


def is_name(text: object) -> bool:
    """Return whether a text may be the prefix of a label: otherwise no reader of a program finds the label."""
    return isinstance(text, str) and re.fullmatch(_PREFIX, text, re.ASCII) is not None


def is_scope(op_id_v: str) -> bool:
    """Return whether the operation is only a name from `@label`, without a kernel."""
    return op_id_v in _scopes


def stamp(values: Sequence[object], inputs: Sequence[object], name: str, payload: str) -> tuple[list[Any], bool]:
    """Return `values` with the label on the first value that can carry it, and whether such a value exists.

    A value that *is* an input was not computed by the call, so no instruction can carry its label.
    """
    stamped = list(values)
    for index, value in enumerate(stamped):
        if isinstance(value, jax.Array) and not any(value is given for given in inputs):
            stamped[index] = compat.programs.set_xla_metadata(value, **{name: payload})
            return stamped, True
    return stamped, False


def extract_labels_from_hlo_text(hlo_text: str) -> list[str]:
    """Return the distinct labels in a program's text, StableHLO or HLO, in order of first appearance."""
    check_argument(isinstance(hlo_text, str), "hlo_text", "a program's text", hlo_text)
    return list(dict.fromkeys(text for text, _ in label_positions(hlo_text)))


def label_positions(text: str) -> Iterator[tuple[str, re.Match[str]]]:
    """Yield each label in `text`, and the match of its operation and key."""
    for body in _BODY_RE.finditer(text):
        prefix = _PREFIX_RE.search(text[max(0, body.start() - _LONGEST_PREFIX) : body.start()])
        if prefix is not None:
            yield prefix.group() + body.group(), body


def find_labels_in_lowered(lowered: object) -> list[str]:
    """Return the distinct labels of a lowered program, e.g. `ejkernel_ops#matmul@v0:0123456789abcdef`, in order.

    Args:
        lowered: The result of `jax.jit(f).lower(...)`, another object with `as_text()`, or a text.
    """
    return extract_labels_from_hlo_text(text_of_program(lowered))


def text_of_program(lowered: Any) -> str:
    """Return the text of a `jax.stages.Lowered` or any object with `as_text()`; a string is returned unchanged."""
    is_text = isinstance(lowered, str)
    check_argument(is_text or hasattr(lowered, "as_text"), "lowered", "a lowered program, or its text", lowered)
    return str(lowered if is_text else lowered.as_text())


def labels_to_configs(labels: object, selector: object = None) -> list[tuple[str, Any]]:
    """Return `(label, configuration)` for each label; the configuration is `None` if the caches have no entry.

    Looks in the chain's memory and then in its persistent cache, for the default device.

    Args:
        labels: A list of labels, or a lowered program.
        selector: The `ConfigSelectorChain` to ask; by default that of the default executor.
    """
    if not isinstance(labels, list | tuple):
        labels = find_labels_in_lowered(labels)
    chain = services.made.default_executor().chooser if selector is None else getattr(selector, "chooser", selector)
    check_argument(hasattr(chain, "cache"), "selector", "a ConfigSelectorChain", selector)
    return [(text, _remembered(chain, text)) for text in labels]


def _remembered(chain: Any, text: str) -> Any:
    match = LABEL_RE.fullmatch(text)
    if match is None:
        raise ConfigError(f"labels must look like 'ejkernel_ops#matmul@v1:0123456789abcdef', got {text!r}.")
    key = (device_fingerprint(), match["op"], match["key"])
    found = chain.cache.get(*key)
    return chain.persistent.get(*key) if found is None and chain.persistent is not None else found
