# SPDX-License-Identifier: Apache-2.0
"""HTML from the templates in `ejkernel/data/templates`, for the report and for notebooks; Jinja2 is an extra."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
from importlib import resources
from typing import TYPE_CHECKING

from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils.formatting import counted, duration

if TYPE_CHECKING:
    import jinja2
    import markupsafe


def render(template: str, **values: object) -> str:
    """Return a template as HTML; all values are escaped.

    Raises:
        ConfigError: Jinja2 is not installed.
    """
    try:
        import jinja2 as jinja2
    except ImportError as error:
        raise ConfigError(f"Jinja2 is not installed ({error}): pip install 'jinja2>=3.1'.") from error
    return _environment().get_template(template).render(**values)


@functools.cache
def _environment() -> jinja2.Environment:
    import jinja2
    import markupsafe

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_text),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"file": lambda name: markupsafe.Markup(_text(name)), "digest": _digest, "counted": counted}
    environment.filters["us"] = microseconds
    environment.filters["breakable"] = _breakable
    return environment


def _breakable(name: str) -> markupsafe.Markup:
    """Return a name as HTML that may continue on a new line after an underscore or colon, or before its version."""
    from markupsafe import Markup, escape

    found = escape(name).replace("_", Markup("_<wbr>")).replace(":", Markup(":<wbr>"))
    return found.replace("@", Markup("<wbr>@"))


def _text(name: str) -> str:
    return resources.files("ejkernel").joinpath("data", "templates", name).read_text(encoding="utf-8")


def _digest(name: str) -> str:
    """Return the digest that lets the browser run this script and no other, a second barrier after escaping."""
    return base64.b64encode(hashlib.sha256(_text(name).encode()).digest()).decode()


def microseconds(time: float | None) -> str:
    """Return a time given in microseconds as text."""
    return duration(None if time is None else time / 1e6)


def is_available() -> bool:
    """Return whether Jinja2 is installed."""
    return importlib.util.find_spec("jinja2") is not None
