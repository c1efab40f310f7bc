# SPDX-License-Identifier: Apache-2.0
"""Names and descriptions for a crafted text or file: every way to run code that we know of.

The module contains targets for such a file: functions, dataclasses, pytree types, enumerations and named tuples. They
append to `FIRED` when they are made, called or queried. It also has a kernel, and names registered by its author.
"""

from __future__ import annotations

import dataclasses
import enum
import os  # noqa: F401 - a name to reach for
import types
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax

from ejkernel.ops import Kernel, nameable
from ejkernel.ops.utils.values.signature import key_of

HERE = __name__
FIRED: list[str] = []


# --- targets for a crafted file ---


def fire(*args: Any, **kwargs: Any) -> Any:
    FIRED.append("fire")


@dataclasses.dataclass
class Fires:
    rows: int = 1

    def __post_init__(self):
        FIRED.append("__post_init__")

    def __reduce__(self):
        return fire, ()

    def __set_state__(self, state):
        FIRED.append("__set_state__")

    @property
    def trap(self):
        return fire()

    @dataclasses.dataclass
    class Inside:
        rows: int = 1

        def __post_init__(self):
            FIRED.append("Inside")


class FiresPair(NamedTuple("FiresPair", [("rows", int)])):
    def __new__(cls, *args):
        FIRED.append("__new__")
        return super().__new__(cls, *args)


class FiringMeta(enum.EnumMeta):
    def __getitem__(cls, name):
        FIRED.append("__getitem__")

    def __getattr__(cls, name):
        FIRED.append("__getattr__")


class FiresMember(enum.Enum, metaclass=FiringMeta):
    ONE = 1

    @classmethod
    def _missing_(cls, value):
        FIRED.append("_missing_")


@jax.tree_util.register_pytree_node_class
class FiresNode:
    def tree_flatten(self):
        return (), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        FIRED.append("tree_unflatten")

    def __class_getitem__(cls, item):
        FIRED.append("__class_getitem__")

    @staticmethod
    def run():
        FIRED.append("run")


class Described:
    def __get__(self, instance, owner):
        FIRED.append("__get__")


class Holder:
    trap = Described()


lazy = types.ModuleType("lazy_by_getattr")
lazy.__getattr__ = fire  # type: ignore[method-assign]
FUNCTIONS = {"swish": fire}
alias = fire


# --- the kernel, and names registered by its author ---


class Mode(enum.Enum):
    FAST = 1
    SAFE = 2


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass(frozen=True)
class Nested:
    level: Level = Level.LOW


@dataclasses.dataclass(frozen=True)
class Options:
    scale: float = 1.0
    nested: Nested | None = None


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int = 1


def by_default(x):
    return x * 2


@nameable
def swish(x):
    return x * jax.nn.sigmoid(x)


class Takes(Kernel[Config, jax.Array]):
    """Takes every static argument, and calls the first if it is a function."""

    def run(
        self,
        x: jax.Array,
        *statics: Any,
        cfg: Config,
        mode: Mode | Literal["none"] = "none",
        options: Options | None = None,
        function: Callable[[jax.Array], jax.Array] = by_default,
        unknown: OnlyForTypeCheckers | None = None,  # noqa: F821
        **more: Any,
    ) -> jax.Array:
        return statics[0](x) if statics and callable(statics[0]) else x * 2

    def heuristic_cfg(self, inv):
        return Config(1)

    def config_space(self, inv):
        return [Config(1), Config(2)]


takes = Takes("takes")


def called_with(*statics, **options):
    """Return the description of a call with already described static arguments."""
    return {"op": "takes@v0", "args": [{"array": ["float32", [4]]}, *statics], "kwargs": options}


def label_of(description):
    return f"ejkernel_ops#takes@v0:{key_of(description)}"


# --- the corpus: every road to code that we know of ---

NAMES = [
    *("os.system", "posix.system", "builtins.eval", "builtins.exec", "builtins.open", "builtins.__import__"),
    *("builtins.getattr", "builtins.type", "builtins.object", "builtins.print", "builtins.compile"),
    *("subprocess.Popen", "subprocess.run", "pickle.loads", "marshal.loads", "ctypes.CDLL", "runpy.run_path"),
    *("importlib.import_module", "functools.partial", "functools.reduce", "operator.attrgetter", "types.FunctionType"),
    *("jax.numpy.load", "jax.numpy.save", "jax.numpy.savez", "jax.numpy.fromfile", "jax.numpy.frombuffer"),
    *("jax.numpy.from_dlpack", "jax.numpy.set_printoptions", "jax.numpy.printoptions", "jax.lax.dce_sink"),
    *("jax.debug.callback", "jax.debug.print", "jax.pure_callback", "jax.experimental.io_callback", "jax.jit"),
    *("jax.config.update", "jax.export.deserialize", "jax.profiler.start_trace", "jax.lax.create_token", "jax"),
    *("jax.nn.gelu.__globals__", "jax.nn.gelu.__wrapped__", "jax.numpy.__loader__", "jax.numpy.__builtins__.eval"),
    *("jax.numpy.__dict__", "jax.numpy.linalg.__spec__.loader.exec_module", "jax.nn.initializers", "numpy.load"),
    *(f"{HERE}.fire", f"{HERE}.alias", f"{HERE}.Fires", f"{HERE}.Fires.trap", f"{HERE}.Fires.__post_init__"),
    *(f"{HERE}.Holder.trap", f"{HERE}.FiresMember.TWO", f"{HERE}.FiresNode.run", f"{HERE}.FUNCTIONS.swish"),
    *(f"{HERE}.lazy.anything", "lazy_by_getattr.anything", "lazy_by_loader.anything", "antigravity.fly", "this.s"),
    *(f"{HERE}.swish.__globals__", f"{HERE}.swish.__code__", f"{HERE}.os.system", f"{HERE}.takes.run"),
    *(f"{HERE}.Options.__init__", f"{HERE}.Mode.FAST", f"{HERE}", "sys.modules", "__main__.fire", "swish"),
    *("", ".", "..", "jax.numpy.", ".tanh", "jax..numpy", "jax.numpy.tanh\0", "jax.numpy.tanh ", "a." * 10_000),
]
TYPES = [
    *(f"{HERE}.{name}" for name in ("Fires", "Fires.Inside", "FiresPair", "FiresNode", "FiresMember", "fire")),
    *("lazy_by_getattr.Config", "lazy_by_loader.Config", "antigravity.Config", "pathlib.Path", "builtins.dict"),
    *("subprocess.Popen", "functools.partial", "signal.Signals", "ejkernel.ops.config.policy.AutotunePolicy", "", "."),
    *("ejkernel.ops.core.invocation.Invocation", "jax.tree_util.Partial", "dataclasses.Field", "json.", "Json"),
]
FOREIGN = [
    *({word: ["os.system", ["true"]]} for word in ("__reduce__", "py/object", "py/reduce", "__class__", "code")),
    *({word: "os.system"} for word in ("__set_state__", "__import__", "module", "call", "eval", "$ref")),
    {"name": "jax.numpy.tanh", "call": True},
    {"name": ["jax.numpy.tanh"]},
    {"name": {"name": "jax.numpy.tanh"}},
    {"enum": f"{HERE}.Mode", "name": "__class__"},
    {"enum": f"{HERE}.Mode", "name": "mro"},
    {"enum": {"name": f"{HERE}.Mode"}, "name": "FAST"},
    {"dataclass": f"{HERE}.Options", "fields": {"scale": 1, "nested": None, "__post_init__": 1}},
    {"dataclass": f"{HERE}.Mode", "fields": {}},
    {"dtype": "O"},
    {"dtype": "float32,(2,)O"},
    {"node": "builtins.dict", "children": [], "aux": None},
    {"partial": {"name": "jax.numpy.tanh"}, "args": [], "kwargs": [["__class__", 1]]},
]


def uses(cls):
    """Yield every form of description that may instantiate a class."""
    yield {"name": cls}
    yield {"enum": cls, "name": "ONE"}
    yield {"dataclass": cls, "fields": {"rows": 1}}
    yield {"namedtuple": cls, "items": [1]}
    yield {"node": cls, "children": [], "aux": None}
    yield {"node": "collections.defaultdict", "children": [1], "aux": [{"name": cls}, ["a"]]}


def wrapped(data):
    """Yield a description in every place where one may stand."""
    yield data
    yield [data]
    yield {"list": [data]}
    yield {"map": [["key", data]]}
    yield {"map": [[data, "value"]]}
    yield {"set": [data]}
    yield {"slice": [data, None, None]}
    yield {"spec": [data]}
    yield {"partial": data, "args": [], "kwargs": {"map": []}}
    yield {"partial": {"name": "jax.numpy.tanh"}, "args": [data], "kwargs": {"map": []}}
    yield {"partial": {"name": "jax.numpy.tanh"}, "args": [], "kwargs": {"map": [["x", data]]}}
    yield {"node": "collections.OrderedDict", "children": [data], "aux": [["a"]]}
    yield {"dataclass": f"{HERE}.Options", "fields": {"scale": data, "nested": None}}


HOSTILE = [
    *({"name": name} for name in NAMES),
    *({"partial": {"name": name}, "args": ["true"], "kwargs": {"map": []}} for name in NAMES),
    *(use for cls in TYPES for use in uses(cls)),
    *FOREIGN,
]
