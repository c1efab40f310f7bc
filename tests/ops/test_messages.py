# SPDX-License-Identifier: Apache-2.0
"""Error messages: they name the kernel, the hook or argument, the value, and the fix."""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
import pytest

from ejkernel import ops
from ejkernel.modules import FlashAttention, FlashAttentionConfig
from ejkernel.ops import (
    AutotunePolicy,
    AutotuningResult,
    ConfigSelectorChain,
    ConfigSpace,
    Executor,
    Invocation,
    Kernel,
    NoParams,
    StalePolicy,
)
from ejkernel.ops import tune as tune_function
from ejkernel.ops.autotuner.tuner import Autotuner
from ejkernel.ops.errors import (
    ArgumentError,
    CallError,
    ConfigError,
    KernelError,
    SerializationError,
    TuningError,
    UnstableKeyError,
)
from ejkernel.ops.utils.error_text import value_text
from ejkernel.ops.utils.values.signature import describe_static

X = np.ones(8, np.float32)


@dataclasses.dataclass(frozen=True)
class Tile:
    n: int = 1


class Scale(Kernel[Tile, jax.Array]):
    def run(self, x, *, cfg):
        return x * cfg.n


class Failing(Scale):
    def run(self, x, *, cfg):
        return boom()


def test_a_name_that_is_not_close_to_an_implementation_gets_no_suggestion():
    with pytest.raises(ConfigError, match=r"got 'flash3'[.]$"):
        FlashAttentionConfig(implementation="flash3")
    with pytest.raises(ConfigError, match="did you mean 'cudnn'"):
        FlashAttentionConfig(implementation="cudn")


@dataclasses.dataclass(eq=False)
class WithField(Scale):
    factor: int


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda: Scale(X), "create the kernel first, scale = Scale('scale'), and call that."),
        (lambda: Scale(X, X), "create the kernel first, scale = Scale('scale'), and call that."),
        (lambda: Scale(x=X), "create the kernel first, scale = Scale('scale'), and call that."),
        (lambda: jax.jit(Scale)(X, X), "create the kernel first, scale = Scale('scale'), and call that."),
        (lambda: FlashAttention(X, X, X), "flash_attention = FlashAttention(), and call that."),
        (lambda: WithField(X, X), "with_field = WithField(...), and call that."),
        (lambda: ops.autotune(Scale, X), "scale = Scale('scale'), and pass that."),
        (lambda: ops.autotune_kernel(Scale, X), "scale = Scale('scale'), and pass that."),
        (lambda: ops.default_executor()(Scale, X), "scale = Scale('scale'), and pass that."),
        (lambda: ops.vmap_with_config(Scale)(X), "scale = Scale('scale'), and pass that."),
        (lambda: Scale("scale", version="2"), "Scale takes only the name of the operation; set the rest in the class."),
    ],
)
def test_a_class_in_place_of_a_kernel_says_how_to_create_it(use, says):
    with pytest.raises(CallError, match=re.escape(says)):
        use()


def test_arguments_of_an_own_constructor_are_its_own_business():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'factor'"):
        WithField()
    assert WithField(3).factor == 3


def kernel(base=Scale, **hooks):
    """Return a kernel with hooks that return a value, or call a function of the invocation."""

    def hook(value):
        return (lambda self, *args: value(*args)) if callable(value) else (lambda self, *args: value)

    return type("Scale", (base,), {name: hook(value) for name, value in hooks.items()})("scale")


def boom(*args, **kwargs):
    raise ValueError("boom")


def call(made, x=X, **options):
    return Executor(ConfigSelectorChain())(made, x, **options)


def tune(made, x=X, **options):
    inv = Invocation(kernel=made, args=(x,))
    return Autotuner().tune(inv, made, **options)


def both(**hooks):
    """Return both ways of running a kernel's hooks: a call, and tuning."""
    return [lambda: call(kernel(**hooks)), lambda: tune(kernel(**hooks))]


def space(**options):
    return lambda inv: ConfigSpace({"n": [1, 2]}, **{"build": Tile, **options})


class Apply(Kernel[int, jax.Array]):
    def run(self, x, *, f, cfg):
        return f(x)

    def heuristic_cfg(self, inv):
        return 1


def tuned(**options):
    @ops.tune(**options)
    def scale(x, *, n=1):
        return x * n

    return scale


OWN = (KernelError, TuningError)  # in a program's tuning, an error of this call alone
TILE = lambda inv: Tile()  # noqa: E731
HOOKS = [
    ("space is None", both(config_space=None), ConfigError, "scale: the result of config_space .* list .* got None"),
    ("space is an int", both(config_space=3), ConfigError, "scale: the result of config_space .* got 3"),
    ("space is a text", both(config_space="ab"), ConfigError, "scale: the result of config_space .* got 'ab'"),
    ("space is a dict", both(config_space={"n": 1}), ConfigError, "scale: the result of config_space .* got {'n': 1}"),
    (
        "space is a generator",
        both(config_space=lambda inv: (Tile(n) for n in (1, 2))),
        ConfigError,
        "scale: the result of config_space .* got <generator.*only once",
    ),
    (
        "space holds an int",
        both(config_space=[Tile(), 5]),
        ConfigError,
        "scale: item 1 of .* a Tile, got 5",
    ),
    ("space raises", both(config_space=boom), OWN, "^scale: .*config_space raised ValueError: boom"),
    (
        "space misspells a field",
        both(config_space=lambda inv: [Tile(N=2)]),
        OWN,
        r"^scale: .*config_space raised TypeError: .*'N'; did you mean 'n'\?",
    ),
    (
        "space has an unknown field",
        both(config_space=lambda inv: [Tile(rows=2)]),
        OWN,
        r"^scale: .*config_space raised TypeError: .*'rows'; its fields are n\.",
    ),
    ("its other name", both(candidate_cfgs=None), ConfigError, "scale: the result of candidate_cfgs .* got None"),
    ("a platform's", both(heuristic_cfg_cpu=None), ConfigError, "scale: heuristic_cfg_cpu must return .* got None"),
    (
        "heuristic is None",
        both(heuristic_cfg=None),
        ConfigError,
        "scale: heuristic_cfg must .* got None; without",
    ),
    ("heuristic is an int", both(heuristic_cfg=3), ConfigError, "scale: the result of heuristic_cfg .* a Tile, got 3"),
    ("heuristic raises", both(heuristic_cfg=boom), OWN, "^scale: .*heuristic_cfg raised ValueError: boom"),
    (
        "constraint raises",
        both(config_space=space(constraints=lambda n: 1 / 0)),
        ConfigError,
        r"^scale: .*the constraint .*<lambda> \(test_messages.py:\d+\) raised ZeroDivisionError.* for {'n': 1}",
    ),
    (
        "build raises",
        both(config_space=space(build=boom)),
        OWN,
        r"^scale: .*build=boom \(test_messages.py:\d+\) raised ValueError: boom, for {'n': 1}",
    ),
    (
        "nothing is left",
        both(config_space=space(constraints=lambda n: False)),
        ops.EjkernelError,
        "scale",
    ),
    ("bucket raises", both(bucket=boom, heuristic_cfg=TILE), OWN, "^scale: .*bucket raised ValueError: boom"),
    ("bucket is None", both(bucket=None, heuristic_cfg=TILE), OWN, "^scale: .*bucket must return .* got None"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "error", "text"),
    [
        pytest.param(act, error, text, id=f"{name}, {way}")
        for name, acts, error, text in HOOKS
        for act, way in zip(acts, ("called", "tuned"), strict=True)
    ],
)
def test_errors_of_a_hook_name_the_kernel_and_the_hook(act, error, text):
    with pytest.raises(error, match=text):
        act()


IN_TUNING = {
    "example_inputs": (None, "scale: example_inputs must return .args, kwargs., such as .*, got None"),
    "example_inputs ": (boom, "scale: example_inputs raised ValueError: boom"),
    "reference": (boom, "scale: example inputs or the reference failed: ValueError: boom"),
}


@pytest.mark.parametrize(("name", "value", "text"), [(name.strip(), *case) for name, case in IN_TUNING.items()])
def test_a_hook_that_only_tuning_calls_is_named_too(name, value, text):
    with pytest.raises(TuningError, match=text):
        tune(kernel(heuristic_cfg=TILE, config_space=[Tile(1), Tile(2)], **{name: value}))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"heuristic": 5}, KernelError, "scale: heuristic must be a function or None, got 5"),
        ({"reference": 5}, KernelError, "scale: reference must be a function or None, got 5"),
        ({"bucket": 5}, KernelError, "scale: bucket must be a function or None, got 5"),
        ({"version": 5}, KernelError, "scale: version must be a string, got 5"),
        ({"name": 5}, KernelError, "name must be ASCII letters, .*, got 5"),
        ({"constraints": 5}, ArgumentError, "scale: constraints must be a condition, .* got 5"),
        ({"constraints": [5]}, ArgumentError, "scale: each of constraints must be a function .* got 5"),
        ({"constraints": lambda n: 1 / 0}, ConfigError, "scale: the constraint .* raised ZeroDivisionError"),
        ({"space": None}, KernelError, r"^tune\(\): tune needs the values .*write @tune\(space="),
        ({"space": 5}, KernelError, "scale: space must be values by name, .*got 5"),
        ({"space": {"n": None}}, KernelError, r"scale: space\['n'\] must be a sequence of values, got None"),
        ({"heuristic": boom}, TuningError, "scale: .*: heuristic raised ValueError: boom"),
        ({"heuristic": lambda inv: None}, ConfigError, "scale: heuristic must return a dictionary, got None"),
        ({"space": boom}, TuningError, "scale: .*: space raised ValueError: boom"),
        ({"space": {"n": boom}}, TuningError, r"scale: .*: space\['n'\] raised ValueError: boom"),
        ({"space": lambda inv: 5}, TuningError, "scale: .*: space must be values by name, .*got 5"),
        ({"bucket": lambda inv: 5}, OWN, r"scale: .*bucket must return \(args, kwargs\), got 5"),
    ],
)
def test_wrong_arguments_of_tune_are_errors_with_the_function_and_the_argument(options, error, text):
    with pytest.raises(error, match=text):
        tune(tuned(**{"space": {"n": [1, 2]}, **options}))


def test_a_static_argument_without_a_name_is_an_error_with_the_kernel_and_the_argument():
    inv = Invocation(kernel=Apply("apply"), args=(X,), kwargs={"f": lambda x: x})
    with pytest.raises(UnstableKeyError, match=r"^apply: f: <function .* has no name .* pass a number"):
        assert inv.call_key
    with pytest.warns(ops.UnstableKeyWarning, match=r"^apply: the call cannot be cached .*heuristic: f: <function"):
        call(Apply("apply"), f=lambda x: x)


@pytest.mark.slow
def test_arguments_that_cannot_be_sent_to_a_worker_are_an_error_with_the_kernel():
    made = kernel(heuristic_cfg=TILE, config_space=[Tile(1), Tile(2)])
    with pytest.raises(TuningError, match=r"^scale: this cannot be sent to a worker process"):
        tune(made, policy=AutotunePolicy(isolate=True))


TEXTS = [
    "",
    "nonsense",
    "{}",
    "[]",
    "null",
    '{"schema": 1, "device": "cpu", "entries": [1]}',
    5,
    None,
    b"\xff",
    "{" * 999,
]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: value_text(text)[:20])
def test_an_invalid_result_text_is_an_error(text):
    with pytest.raises(SerializationError, match=r"^text must be what AutotuningResult.dumps\(\) returned(: |, got )"):
        AutotuningResult.loads(text)


@pytest.mark.parametrize("text", ["", "nonsense", 5, None, b"\xff"], ids=repr)
def test_an_invalid_json_text_is_shown(text):
    with pytest.raises(SerializationError, match=f"text .*{re.escape(repr(text))}"):
        ops.from_json(text, Tile)


ARGUMENTS = [
    (lambda: AutotunePolicy(budget_s="3"), ConfigError, "budget_s must be .* got '3'"),
    (lambda: AutotunePolicy(on_miss="tune"), CallError, "`on_miss`: autotune=True is EJKERNEL_ON_MISS=tune, and heur"),
    (lambda: AutotunePolicy(budget=3), CallError, "AutotunePolicy has no argument `budget`; did you mean `budget_s=`"),
    (lambda: StalePolicy(jx="use"), CallError, "StalePolicy has no argument `jx`; did you mean `jax=`"),
    (lambda: FlashAttentionConfig(implementaton="xla"), CallError, "FlashAttentionConfig .*mean `implementation=`"),
    (
        lambda: FlashAttentionConfig("xla"),
        CallError,
        "takes 0 arguments by position, got 1; .*by name: implementation=",
    ),
    (
        lambda: FlashAttentionConfig(fwd={"q_blocksize": 64}),
        ConfigError,
        r"fwd must be an instance of FwdParams .*; pass e.g. FwdParams\(q_blocksize=\.\.\., kv_blocksize=",
    ),
    (lambda: NoParams(tile=3), CallError, "NoParams has no argument `tile`; it takes none by name"),
    (
        lambda: ops.policy_override(on_miss="tune").__enter__(),
        ConfigError,
        r"agree, stale\. autotune=True is EJKERNEL_ON",
    ),
    (lambda: ops.policy_override(budget=3).__enter__(), ConfigError, "AutotunePolicy has no .*did you mean 'budget_s'"),
    (lambda: AutotunePolicy(budget_s=True), ConfigError, "budget_s must be .* got True"),
    (lambda: Autotuner(rounds="a"), ArgumentError, "rounds must be a positive int, got 'a'"),
    (lambda: Autotuner(warmup=-1), ArgumentError, "warmup must be an int >= 0, got -1"),
    (lambda: Autotuner().tune(None, Scale("s")), ArgumentError, "inv must be an Invocation, got None"),
    (
        lambda: Autotuner().tune(Invocation(kernel=Scale("s"), args=(X,)), None),
        ArgumentError,
        "kernel must be a Kernel",
    ),
    (lambda: ops.autotune(Scale("s"), X, num_iters="3"), ArgumentError, "num_iters must be .* got '3'"),
    (lambda: tune(kernel(heuristic_cfg=TILE), candidates=5), ConfigError, "scale: candidates must be a list .* got 5"),
    (
        lambda: tune(kernel(heuristic_cfg=TILE), candidates=[5]),
        ConfigError,
        "scale: each candidate .* a Tile, got 5",
    ),
    (lambda: ops.autotune_lowered(ConfigSelectorChain(), None), ArgumentError, "lowered must be .* got None"),
    (lambda: ops.autotune_lowered(5, ""), ArgumentError, "selector must be a ConfigSelectorChain .* got 5"),
    (lambda: ops.autotune_recorded("abc"), ArgumentError, "invocations must be .* got 'abc'"),
    (lambda: ops.autotune_recorded({"op": 5}), ArgumentError, r"invocations\['op'\] must be .* got 5"),
    (lambda: ops.autotune_recorded({"op": {"k": 5}}), ArgumentError, r"invocations\['op'\]\['k'\] must be .* got 5"),
    (lambda: ops.benchmark(5), ArgumentError, "fn must be a function, got 5"),
    (lambda: ops.benchmark(len, num_iters="a"), ConfigError, "num_iters must be .* got 'a'"),
    (lambda: ConfigSelectorChain(5), ArgumentError, "cache must be a ConfigCache, got 5"),
    (lambda: ConfigSelectorChain(persistent=5), ArgumentError, "persistent must be a PersistentCache, got 5"),
    (lambda: ConfigSelectorChain(policy=5), ArgumentError, "policy must be an AutotunePolicy, got 5"),
    (lambda: ConfigSelectorChain(tuner=5), ArgumentError, "tuner must be an Autotuner, got 5"),
    (lambda: ConfigSelectorChain().choose(None, None), ArgumentError, "inv must be an Invocation, got None"),
    (lambda: Invocation(kernel=5, args=(X,)), ArgumentError, "kernel must be a Kernel, got 5"),
    (lambda: Invocation(kernel=Scale("s"), args=X), ArgumentError, "args must be a tuple .* got an array float32"),
    (lambda: Invocation(kernel=Scale("s"), kwargs=[1]), ArgumentError, r"kwargs must be a mapping .* got \[1\]"),
    (lambda: ops.default_key_builder_with_sharding(5), ArgumentError, "kernel must be a Kernel, got 5"),
    (lambda: ops.record_invocation(5, 6), ArgumentError, "kernel must be a Kernel, got 5"),
    (lambda: ops.record_invocation(Scale("s"), 6), ArgumentError, "inv must be an Invocation, got 6"),
    (lambda: Executor(ConfigSelectorChain(), "a b"), ArgumentError, "stamp_prefix must be .* got 'a b'"),
    (lambda: Executor(ConfigSelectorChain(), ""), ArgumentError, "stamp_prefix must be .* got ''"),
    (lambda: ops.vmap_with_config(5), ArgumentError, "kernel must be a Kernel, got 5"),
    (lambda: ops.pmap_with_config(5), ArgumentError, "kernel must be a Kernel, got 5"),
    (lambda: ops.label(5), (ConfigError, ArgumentError), "label name must be .* got 5"),
    (lambda: ops.find_labels_in_lowered(5), ArgumentError, "lowered must be .* got 5"),
    (lambda: ops.extract_labels_from_hlo_text(5), ArgumentError, "hlo_text must be .* got 5"),
    (lambda: ops.labels_to_configs([], 5), ArgumentError, "selector must be .* got 5"),
    (lambda: ops.on_event(5).__enter__(), ArgumentError, "listener must be a function .* got 5"),
    (lambda: ConfigSpace([1]), ArgumentError, r"axes must be a mapping .* got \[1\]"),
    (lambda: ConfigSpace({"a": 5}), ConfigError, "axes must map a name .* got 'a': 5"),
    (lambda: ConfigSpace({"a": [1]}, build=5), ArgumentError, "build must be a class.* got 5"),
    (lambda: ConfigSpace({"a": [1]}, constraints=[5]), ArgumentError, "each of constraints .* got 5"),
    (lambda: Kernel(name=5), KernelError, "name must be .* got 5"),
    (lambda: AutotuningResult("cpu", (5,)), ArgumentError, "each of entries must be an Entry, got 5"),
    (lambda: AutotuningResult("cpu", ()).save(5), ArgumentError, "cache must be a ConfigCache .* got 5"),
]


@pytest.mark.parametrize(("act", "error", "text"), ARGUMENTS, ids=[text for _, _, text in ARGUMENTS])
def test_an_argument_of_the_wrong_sort_is_named_and_shown(act, error, text):
    with pytest.raises(error, match=text):
        act()


class Unspeakable:
    def __repr__(self):
        raise RuntimeError("no words")


def test_a_value_that_cannot_be_shown_does_not_hide_the_message():
    with pytest.raises(ArgumentError, match="fn must be a function, got a Unspeakable, whose __repr__ raises"):
        ops.benchmark(Unspeakable())


def test_our_own_errors_in_a_hook_keep_their_type():
    def unsupported(inv):
        raise ops.UnsupportedError("not here")

    with pytest.raises(ops.UnsupportedError, match=r"^not here\b"):
        call(kernel(heuristic_cfg=unsupported))


class Split(Scale):
    def run(self, x, *, cfg):
        return x.reshape(-1, cfg.n)


@tune_function(space={"n": [1, 2, 4]})
def split(x, *, n=1):
    return x.reshape(-1, n)


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda made: made(X, cfg={"n": 2}), r"scale: cfg must be a Tile, got \{'n': 2\}; pass e.g. Tile\(n=1\)"),
        (lambda made: made(X, cfg=Tile("a")), r"scale: cfg=Tile\(n='a'\): n must be of type int, got 'a'; pass e.g. "),
        (lambda made: made(X, cfg=Tile(3)), r"scale: cfg=Tile\(n=3\) is not in the space of this call; pass e.g. "),
        (lambda made: jax.jit(lambda x: made(x, cfg=Tile(3)))(X), r"Tile\(n=1\) or Tile\(n=2\), or leave cfg out"),
        (lambda made: split(X, n=3), r"split: n=3 is not in the space of this call; pass e.g. n=1 or n=2 or n=4"),
        (lambda made: split(X, cfg={"m": 3}), r"split: cfg must be a dictionary with n; got \{'m': 3\}"),
    ],
)
def test_a_configuration_that_does_not_fit_the_call_is_named_with_those_that_do(act, text):
    with pytest.raises(ConfigError, match=text):
        act(kernel(Split, config_space=[Tile(1), Tile(2)]))


def test_a_configuration_outside_the_space_may_run():
    assert kernel(Split, config_space=[Tile(1), Tile(2)])(X, cfg=Tile(4)).shape == (2, 4)


def test_exceptions_of_run_are_unchanged():
    with pytest.raises(ValueError, match=r"^boom\b"):
        call(kernel(Failing, heuristic_cfg=TILE))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.PersistentCache("x", layers=[3]), "layers must contain only folders and URLs, got 3"),
        (
            lambda: ops.autotune(kernel(config_space=[Tile()]), jax.ShapeDtypeStruct((8,), "float32"), inputs=True),
            "inputs=True needs arrays to measure with, got ShapeDtypeStruct.* pass arrays, or a function",
        ),
        (
            lambda: describe_static({"table": X}),
            "is an array inside a static argument, .* pass the array as an argument",
        ),
    ],
)
def test_arguments_that_cannot_be_used_are_errors_with_the_fix(call, message):
    with pytest.raises((ArgumentError, ConfigError, UnstableKeyError), match=message):
        call()
