# SPDX-License-Identifier: Apache-2.0
"""Operations: shared declarations, the parts of each implementation, and the resulting behaviour."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import FlashAttentionConfig, RmsNormConfig, flash_attention, rms_norm
from ejkernel.ops import (
    ArgumentError,
    AutotunePolicy,
    Autotuner,
    CacheWarning,
    ConfigError,
    ConfigSpace,
    FwdParams,
    Implementation,
    Implementations,
    Invocation,
    Kernel,
    KernelError,
    KernelWarning,
    LazyImplementation,
    NoParams,
    Operation,
    OperationCall,
    OperationConfig,
    PersistentCache,
    UnsupportedError,
    autotune,
    autotune_kernel,
    default_executor,
    from_json,
    to_json,
)
from ejkernel.testing import check_kernel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScaleCall(OperationCall):
    length: int
    factor: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    block: int = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    tile: int = 8
    order: str = "rows"


class Plain(Implementation[ScaleCall]):
    """Runs everything, by JAX alone."""

    name = "plain"
    params = Blocks
    differentiable = True

    def heuristic(self, call):
        return Blocks(block=16 if call.backward else 4)

    def space(self, call):
        return [Blocks(block=block) for block in (4, 8, 16)]

    def forward(self, call, x, *, params):
        return call.factor * x, ()


SEEN = []  # executed calls: implementation, direction, parameters


class Fast(Implementation[ScaleCall]):
    """Runs even lengths, and is nothing that JAX can differentiate."""

    name = "fast"
    params = Tiles

    def unsupported(self, call):
        return f"length is {call.length}, and 'fast' takes even ones; use 'plain'." if call.length % 2 else None

    def params_fault(self, call, params):
        return "tile does not fit" if params.tile > call.length else None

    def heuristic(self, call):
        return Tiles(tile=2, order="columns" if call.backward else "rows")

    def space(self, call):
        return [Tiles(tile=tile, order=order) for tile in (2, 4, 1024) for order in ("rows", "columns")]

    def forward(self, call, x, *, params):
        SEEN.append(("fast", "fwd", params))
        return opaque(call.factor * x), ()

    def backward(self, call, residuals, out, cotangents, x, *, params):
        SEEN.append(("fast", "bwd", params))
        return (call.factor * cotangents[0],)


@jax.custom_vjp
def opaque(x):
    return x


def _not_differentiable(*_):
    raise AssertionError("differentiated")


opaque.defvjp(_not_differentiable, _not_differentiable)


class ScaleConfig(OperationConfig):
    pass


class Scale(Operation[ScaleConfig, ScaleCall, jax.Array]):
    implementations = Implementations({"fast": Fast(), "plain": Plain()})

    def prepare(self, x, *, factor=2.0, implementation=None):
        return (x,), {"factor": factor, "implementation": self.requested(implementation)}

    def describe(self, x, *, factor):
        return ScaleCall(length=x.shape[0], factor=factor)


SCALE = Scale("scale")
EVEN, ODD = jnp.arange(6.0), jnp.arange(7.0)
PLAIN = ScaleConfig(implementation="plain")


def call(x=EVEN, device="", **options):
    args, options = SCALE.prepare(jax.ShapeDtypeStruct(x.shape, x.dtype), **options)
    return Invocation(kernel=SCALE, args=args, kwargs=options, device=device)


@pytest.fixture(autouse=True)
def nothing_seen():
    SEEN.clear()


def test_an_operation_that_does_not_describe_a_call_is_named():
    class UndescribedConfig(OperationConfig):
        pass

    class Undescribed(Operation[UndescribedConfig, ScaleCall, jax.Array]):
        implementations = Implementations({"plain": Plain()})
        prepare = Scale.prepare

        def describe(self, x, *, factor):
            ScaleCall(length=x.shape[0], factor=factor)

    with pytest.raises(KernelError, match=r"^Undescribed\.describe must return an OperationCall, got None\."):
        Undescribed("undescribed")(EVEN)


class OnOnePlatform(Plain):
    """Runs on the platform that a subclass names as its home."""

    def unsupported(self, call):
        is_elsewhere = call.platform not in (None, self.home)
        reason = f"{self.name!r} is for a {self.home.upper()}, and this call is for {call.platform}."
        return reason if is_elsewhere else None


class Local(OnOnePlatform):
    """Runs where this process's device is."""

    name, home = "local", "cpu"


class LocalConfig(OperationConfig):
    pass


class WithLocal(Operation[LocalConfig, ScaleCall, jax.Array]):
    implementations = Implementations({"local": Local(), "plain": Plain()})
    prepare, describe = Scale.prepare, Scale.describe


LOCAL = WithLocal("local")


class Calls(Kernel[int, jax.Array]):
    """Calls another operation where it runs, and in its gradient one that the program has nowhere else."""

    def run(self, x, *, cfg):
        return LOCAL(x) + cfg

    def heuristic_cfg(self, inv):
        return 1

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return (LOCAL(cotangents[0], factor=3.0),)


CALLS = Calls("calls")


class Away(OnOnePlatform):
    """Runs on a device that this process does not have."""

    name, home = "away", "tpu"


class AwayConfig(OperationConfig):
    pass


class WithAway(Operation[AwayConfig, ScaleCall, jax.Array]):
    implementations = Implementations({"away": Away()})
    prepare, describe = Scale.prepare, Scale.describe


AWAY = WithAway("away")


class Batched(Calls):
    """In its gradient, takes another operation's tangent under a `vmap` that has a name and batches none of it."""

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        def one(index):
            return index * jax.jvp(LOCAL, primals, cotangents)[1]

        return (jax.vmap(one, axis_name="examples")(jnp.arange(3.0)).sum(0),)


BATCHED = Batched("batched")


# --- choosing ---


def test_the_first_implementation_that_runs_a_call_is_its_heuristics():
    assert SCALE.heuristic_cfg(call()) == ScaleConfig(implementation="fast", fwd=Tiles(tile=2))
    assert SCALE.heuristic_cfg(call(ODD)) == ScaleConfig(implementation="plain", fwd=Blocks(block=4))
    assert SCALE.able(call()) == ["fast", "plain"]


def test_a_requested_implementation_runs_or_gives_the_reason():
    assert SCALE.heuristic_cfg(call(implementation="plain")).implementation == "plain"
    with pytest.raises(UnsupportedError, match=r"scale: length is 7, and 'fast' takes even ones; use 'plain'\."):
        SCALE(ODD, implementation="fast")


def test_several_names_are_an_order_of_preference():
    assert SCALE.able(call(implementation=["plain", "fast"])) == ["plain", "fast"]
    assert SCALE.able(call(ODD, implementation=("fast", "plain"))) == ["plain"]
    np.testing.assert_array_equal(SCALE(ODD, implementation=["fast", "plain"]), 2 * ODD)
    assert call(implementation=["fast"]).call_key == call(implementation="fast").call_key


@pytest.mark.parametrize("wrong", ["magic", ["fast", "magic"], [], 3, "fas"])
def test_an_unknown_name_is_refused(wrong):
    with pytest.raises(ArgumentError, match="implementation must be one of fast, plain, or None; got"):
        SCALE(EVEN, implementation=wrong)


@pytest.mark.parametrize(
    "function",
    [LOCAL, CALLS, jax.grad(lambda x: CALLS(x).sum()), jax.grad(lambda x: BATCHED(x).sum())],
    ids=["call", "within", "grad", "named vmap in a gradient"],
)
def test_a_program_for_another_platform_uses_its_implementation(function):
    jax.jit(function).trace(EVEN).lower(lowering_platforms=("tpu",))
    assert jax.jit(function)(EVEN).shape == EVEN.shape


@pytest.mark.parametrize("named", [None, "away"])
def test_an_implementation_for_another_platform_is_lowered_for_it_only(named):
    def function(x):
        return AWAY(x, implementation=named)

    for wanted in (function, jax.grad(lambda x: function(x).sum())):
        jax.jit(wanted).trace(EVEN).lower(lowering_platforms=("tpu",))
        with pytest.raises(UnsupportedError, match=r"'away' is for a TPU, and this call is for cpu\."):
            wanted(EVEN)


def test_residuals_of_another_platforms_implementation_are_a_clear_error():
    class Leaves(Local):
        residuals = "the argument"

        def forward(self, call, x, *, params):
            return x, (x,)

        def backward(self, call, residuals, out, cotangents, x, *, params):
            return cotangents

    class LeavesConfig(OperationConfig):
        pass

    class WithBoth(WithLocal, Operation[LeavesConfig, ScaleCall, jax.Array]):
        implementations = Implementations({"local": Leaves(), "away": Away()})

    kernel = WithBoth("both")
    jax.grad(lambda x: kernel(x).sum())(EVEN)
    with pytest.raises(KernelError, match=r"gives float32\[6\] on tpu, .* on cpu, which the program was traced for\."):
        jax.jit(jax.grad(lambda x: kernel(x).sum())).trace(EVEN).lower(lowering_platforms=("tpu",))


def test_the_message_has_the_reason_of_every_implementation():
    class Never(Plain):
        name = "never"

        def unsupported(self, call):
            return "it is never."

    class OddConfig(OperationConfig):
        pass

    class Odd(Operation[OddConfig, ScaleCall, jax.Array]):
        implementations = Implementations({"fast": Fast(), "never": Never()})
        prepare, describe = Scale.prepare, Scale.describe

    with pytest.raises(UnsupportedError, match=r"length is 7, .* it is never\."):
        Odd()(ODD)


def test_arguments_are_prepared_once_a_call():
    count = []

    class Counting(Scale):
        def prepare(self, *args, **options):
            count.append(args)
            return super().prepare(*args, **options)

    kernel = Counting("counted")
    jax.jit(jax.grad(lambda x: kernel(x).sum())).lower(EVEN)
    assert len(count) == 1


# --- configurations ---


def test_a_configuration_with_an_unknown_implementation_names_the_known_ones():
    with pytest.raises(ConfigError, match="implementation must be one of fast, plain; got 'magic'"):
        ScaleConfig(implementation="magic")
    with pytest.raises(
        ConfigError,
        match=r"fwd must be an instance of Tiles for implementation='fast', got Blocks\(block=4\); pass e\.g\. Tiles\(",
    ):
        ScaleConfig(implementation="fast", fwd=Blocks())


@pytest.mark.parametrize(
    "config",
    [PLAIN, ScaleConfig(implementation="fast", fwd=Tiles(tile=4)), ScaleConfig(implementation="plain", bwd=Blocks())],
)
def test_a_configuration_survives_a_file(config):
    assert from_json(to_json(config), ScaleConfig) == config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"implementation": "magic"}', "implementation must be one of fast, plain; got 'magic'"),
        ('{"implementation": "fast", "fwd": {"block": 4}}', r"\$\.fwd\.block: .*no such field"),
        ('{"implementation": "fast", "fwd": {"tile": "4"}}', r"\$\.fwd\.tile: expected int, got str '4'"),
        ('{"implementation": "fast", "speed": 4}', r"\$\.speed: ScaleConfig has no such field"),
        ('{"implementation": 3}', r"\$\.implementation: expected str"),
        ('{"fwd": {}}', r"\$\.implementation: missing"),
        ("[]", "expected an object"),
    ],
)
def test_a_file_is_read_strictly_by_the_name_in_it(text, words):
    with pytest.raises(ConfigError, match=words):
        from_json(text, ScaleConfig)


def test_attention_entries_of_the_earlier_layout_load_where_xla_runs(tmp_path):
    cache, key = PersistentCache(tmp_path), ("cpu", "flash_attention@v0", "0" * 16)
    params = {"q_blocksize": 64, "kv_blocksize": 128, "num_warps": None, "num_stages": None}
    unset = dict.fromkeys(params)
    cache.put(key, {"implementation": "xla", "fwd": params, "bwd": unset})
    assert cache.get(key, cfg_type=FlashAttentionConfig).fwd == FwdParams(q_blocksize=64, kv_blocksize=128)


@pytest.mark.parametrize(
    ("config_type", "entry"),
    [
        (FlashAttentionConfig, {"implementation": "cudnn", "fwd": {"q_blocksize": None}, "bwd": {"q_blocksize": None}}),
        (RmsNormConfig, {"implementation": "xla", "fwd_block_rows": 16, "bwd_block_rows": None}),
    ],
)
def test_other_entries_of_earlier_layouts_are_a_warned_miss(config_type, entry, tmp_path):
    cache, key = PersistentCache(tmp_path), ("cpu", "operation@v0", "0" * 16)
    cache.put(key, entry)
    with pytest.warns(CacheWarning, match="has no such field"):
        assert cache.get(key, cfg_type=config_type) is None


# --- both directions ---


def test_a_given_configuration_is_for_the_call_and_its_gradient():
    cfg = ScaleConfig(implementation="fast", fwd=Tiles(tile=4))
    jax.grad(lambda x: SCALE(x, cfg=cfg).sum())(EVEN)
    assert set(SEEN) == {("fast", "fwd", Tiles(tile=4)), ("fast", "bwd", Tiles(tile=2, order="columns"))}
    SEEN.clear()
    both = dataclasses.replace(cfg, bwd=Tiles(tile=6))
    jax.grad(lambda x: SCALE(x, cfg=both).sum())(EVEN)
    assert ("fast", "bwd", Tiles(tile=6)) in SEEN


@pytest.mark.slow
def test_a_gradient_is_configured_apart_where_the_residuals_are_the_same():
    spaces = {}

    class Spy(Scale):
        def config_space(self, inv):
            spaces[inv.direction] = super().config_space(inv)
            return spaces[inv.direction]

    spy = Spy("scale")
    found = autotune(jax.jit(jax.grad(lambda x: spy(x).sum())), EVEN)
    assert {entry.op_id_v for entry in found.entries} == {"scale@v0", "scale.bwd@v0"}
    assert {config.implementation for config in spaces["bwd"]} == {"fast", "plain"}
    assert all(config.fwd is None and config.bwd is not None for config in spaces["bwd"])


class Private(Plain):
    name = "private"
    residuals = "the square"

    def unsupported(self, call):
        return "not backwards." if call.backward and call.length % 2 else None

    def forward(self, call, x, *, params):
        return call.factor * x, x * x

    def backward(self, call, residuals, out, cotangents, x, *, params):
        assert residuals.shape == x.shape
        return (call.factor * cotangents[0],)


class PrivateConfig(OperationConfig):
    pass


class WithPrivate(Operation[PrivateConfig, ScaleCall, jax.Array]):
    implementations = Implementations({"private": Private(), "plain": Plain()})
    prepare, describe = Scale.prepare, Scale.describe


def test_an_implementation_with_private_residuals_runs_both_directions_or_none():
    kernel = WithPrivate()
    assert kernel.able(dataclasses.replace(call(), kernel=kernel)) == ["private"]
    assert kernel.able(dataclasses.replace(call(ODD), kernel=kernel)) == ["plain"]
    for x in (EVEN, ODD):
        np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: kernel(x).sum()))(x), jnp.full_like(x, 2))


def test_a_substitute_backward_must_take_the_residuals():
    cfg = PrivateConfig(implementation="private")
    with pytest.raises(UnsupportedError, match=r"WithPrivate\.bwd: not backwards\."):
        jax.grad(lambda x: WithPrivate()(x, cfg=cfg).sum())(ODD)


def test_another_implementation_computes_a_missing_gradient():
    class Forward(Fast):
        name = "forward"
        backward = Implementation.backward

    class ForwardConfig(OperationConfig):
        pass

    class WithForward(Operation[ForwardConfig, ScaleCall, jax.Array]):
        implementations = Implementations({"forward": Forward(), "plain": Plain()})
        prepare, describe = Scale.prepare, Scale.describe

    kernel = WithForward()
    np.testing.assert_array_equal(jax.grad(lambda x: kernel(x).sum())(EVEN), jnp.full(6, 2.0))
    cfg = ForwardConfig(implementation="forward")
    np.testing.assert_array_equal(jax.grad(lambda x: kernel(x, cfg=cfg).sum())(EVEN), jnp.full(6, 2.0))
    SEEN.clear()
    gradient = jax.grad(lambda x: kernel(x, implementation="forward").sum())
    np.testing.assert_array_equal(gradient(EVEN), jnp.full(6, 2.0))
    assert {(name, direction) for name, direction, _ in SEEN} == {("fast", "fwd")}


def test_a_named_forward_without_a_matching_backward_has_no_gradient():
    class Lonely(Fast):
        name, residuals = "lonely", "the square"
        backward = Implementation.backward

    class LonelyConfig(OperationConfig):
        pass

    class WithLonely(Operation[LonelyConfig, ScaleCall, jax.Array]):
        implementations = Implementations({"lonely": Lonely(), "plain": Plain()})
        prepare, describe = Scale.prepare, Scale.describe

    with pytest.raises(UnsupportedError, match=r"WithLonely\.bwd: implementation='lonely' has no gradient"):
        jax.grad(lambda x: WithLonely()(x, implementation="lonely").sum())(EVEN)


def test_both_directions_agree_on_the_residuals():
    """Both take the first with matching residuals in a forward and a backward."""

    class First(Private):
        name = "first"

        def unsupported(self, call):
            return "not backwards." if call.backward else None

    class Second(Plain):
        name = "second"

    class Third(Private):
        name = "third"

        def unsupported(self, call):
            return None if call.backward else "not forwards."

    class MixedConfig(OperationConfig):
        pass

    class Mixed(Operation[MixedConfig, ScaleCall, jax.Array]):
        implementations = Implementations({"first": First(), "second": Second(), "third": Third()})
        prepare, describe = Scale.prepare, Scale.describe

    seen = {}

    class Spy(Mixed):
        def heuristic_cfg(self, inv):
            seen[inv.direction] = super().heuristic_cfg(inv).implementation
            return super().heuristic_cfg(inv)

    spy = Spy()
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: spy(x).sum()))(EVEN), jnp.full(6, 2.0))
    assert seen == {"fwd": "first", "bwd": "third"}


def test_without_a_backward_jax_differentiates_the_forward():
    np.testing.assert_array_equal(jax.grad(lambda x: SCALE(x, cfg=PLAIN).sum())(EVEN), jnp.full(6, 2.0))


class Bare(Plain):
    name = "bare"

    def forward(self, call, x, *, params):
        return x * 2


class Triple(Plain):
    name = "triple"

    def forward(self, call, x, *, params):
        return x * 2, x, x


class BareConfig(OperationConfig):
    pass


class WithBare(Operation[BareConfig, ScaleCall, jax.Array]):
    implementations = Implementations({"bare": Bare(), "triple": Triple()})
    prepare, describe = Scale.prepare, Scale.describe


@pytest.mark.parametrize("transform", [lambda f: f, lambda f: jax.grad(lambda x: f(x).sum())])
@pytest.mark.parametrize(("name", "given"), [("bare", r"JitTracer|an array float32\[6\]"), ("triple", "3 items")])
def test_a_forward_without_residuals_must_say_so(name, given, transform):
    wrong = rf"{name.title()}\.forward must return \(output, residuals\), got .*({given}); without residuals, "
    with pytest.raises(KernelError, match=wrong):
        transform(functools.partial(WithBare(), implementation=name))(EVEN)


@pytest.mark.slow
def test_tangents_and_second_derivatives_need_an_implementation_that_jax_can_differentiate():
    for x in (EVEN, ODD):
        np.testing.assert_array_equal(jax.jvp(SCALE, (x,), (x,))[1], 2 * x)
    np.testing.assert_array_equal(jax.hessian(lambda x: (SCALE(x) ** 2).sum())(EVEN), 8 * jnp.eye(6))
    with pytest.raises(UnsupportedError, match=r"not available with implementation='fast'; use 'plain'"):
        jax.jvp(functools.partial(SCALE, implementation="fast"), (EVEN,), (EVEN,))


@pytest.mark.slow
def test_a_given_configuration_that_jax_cannot_differentiate_takes_anothers_tangents():
    cfg = ScaleConfig(implementation="fast")
    function = functools.partial(SCALE, cfg=cfg)
    np.testing.assert_array_equal(jax.jvp(function, (EVEN,), (EVEN,))[1], 2 * EVEN)
    np.testing.assert_array_equal(jax.hessian(lambda x: (function(x) ** 2).sum())(EVEN), 8 * jnp.eye(6))


class Counted(Plain):
    """Its reference knows nothing of implementations, as `describe`."""

    name = "counted"


class CountedConfig(OperationConfig):
    pass


class WithReference(Operation[CountedConfig, ScaleCall, jax.Array]):
    implementations = Implementations({"counted": Counted(), "plain": Plain()})
    prepare, describe = Scale.prepare, Scale.describe

    def reference(self, x, *, factor):
        return factor * x


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [None, "plain"])
def test_a_reference_gets_the_options_of_the_description(implementation):
    operation = WithReference("with_reference")
    result = autotune_kernel(operation, EVEN, implementation=implementation)
    assert {outcome.status for outcome in result.searches[0].outcomes} <= {"measured", "same"}
    check_kernel(
        operation, EVEN, implementation=implementation, without=["vmap", "inputs", "dtypes", "export", "platforms"]
    )


# --- faults, spaces ---


def test_parameters_that_must_not_run_a_call_are_refused_and_no_candidates():
    with pytest.raises(ConfigError, match=r"scale: Tiles\(tile=1024.* is invalid for this call: tile does not fit"):
        SCALE(EVEN, cfg=ScaleConfig(implementation="fast", fwd=Tiles(tile=1024)))
    assert SEEN == []
    tiles = [config.fwd.tile for config in SCALE.config_space(call()) if config.implementation == "fast"]
    assert tiles == [2, 2, 4, 4]


class Large(Fast):
    name = "large"

    def space(self, call):
        return ConfigSpace(
            {"tile": range(2, 130, 2), "order": ["rows", "columns"]},
            constraints=lambda tile: tile % 4 or tile > 60,
            build=Tiles,
        )


class Lonely(Fast):
    name = "lonely"
    params = NoParams

    def params_fault(self, call, params):
        return None

    def heuristic(self, call):
        return NoParams()

    def space(self, call):
        return [NoParams()]


class LargeConfig(OperationConfig):
    pass


class WithLarge(Operation[LargeConfig, ScaleCall, jax.Array]):
    implementations = Implementations({"lonely": Lonely(), "large": Large(), "plain": Plain()})
    prepare, describe = Scale.prepare, Scale.describe


def test_spaces_of_several_implementations_are_one_space():
    x = jnp.arange(256.0)
    kernel = WithLarge()
    inv = dataclasses.replace(call(x), kernel=kernel)
    space = kernel.config_space(inv)
    own = [LargeConfig(implementation="large", fwd=params) for params in Large().space(kernel.call_of(inv))]
    plain = [LargeConfig(implementation="plain", fwd=Blocks(block=block)) for block in (4, 8, 16)]
    expected = [LargeConfig(implementation="lonely", fwd=NoParams()), *own, *plain]
    assert isinstance(space, ConfigSpace)
    assert (space.exact, len(space)) == (True, len(expected))
    assert sorted(map(repr, space)) == sorted(map(repr, expected))
    assert all(space.config(space.point(config)) == config for config in expected)
    assert LargeConfig(implementation="large", fwd=Tiles(tile=4)) not in space
    assert [axis.numeric for axis in space.axes if axis.name in ("large.tile", "plain.block")] == [True, True]


def test_an_implementation_with_an_empty_space_is_left_out():
    class Empty(Large):
        name = "empty"

        def space(self, call):
            return ConfigSpace({"tile": [2, 4]}, constraints=lambda tile: tile > 4, build=Tiles)

    class EmptyConfig(OperationConfig):
        pass

    class WithEmpty(Operation[EmptyConfig, ScaleCall, jax.Array]):
        implementations = Implementations({"empty": Empty(), "plain": Plain()})
        prepare, describe = Scale.prepare, Scale.describe

    kernel = WithEmpty()
    space = kernel.config_space(dataclasses.replace(call(), kernel=kernel))
    assert [config.implementation for config in space] == ["plain"] * 3


@pytest.mark.slow
def test_one_search_goes_over_all_implementations():
    kernel, x = WithLarge(), jnp.arange(256.0)
    inv = dataclasses.replace(call(x), kernel=kernel)
    tuner = Autotuner(rounds=1, warmup=1)
    tuned = tuner.tune(inv, kernel, policy=AutotunePolicy(max_candidates=12))
    assert len(tuned.outcomes) == 12
    assert {outcome.config.implementation for outcome in tuned.outcomes[:3]} == {"lonely", "large", "plain"}


# --- loading ---


def test_a_backend_is_imported_when_it_is_asked_for_and_says_why_it_cannot_be(tmp_path, monkeypatch):
    (tmp_path / "lazy_backend.py").write_text("import nothing_of_that_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    table = {"lazy": LazyImplementation("lazy_backend:Lazy", platforms=("gpu",)), "plain": Plain()}

    class LazyConfig(OperationConfig):
        pass

    class WithLazy(Operation[LazyConfig, ScaleCall, jax.Array]):
        implementations = Implementations(table)
        prepare, describe = Scale.prepare, Scale.describe

    kernel = WithLazy()
    assert kernel.able(dataclasses.replace(call(device="cpu:x"), kernel=kernel)) == ["plain"]
    refusals = kernel.refusals(dataclasses.replace(call(device="cpu:x"), kernel=kernel))
    assert refusals == {"lazy": "implementation='lazy' needs a GPU, and this call is for cpu:x."}
    assert "lazy_backend" not in sys.modules
    assert kernel.able(dataclasses.replace(call(device="gpu:x"), kernel=kernel)) == ["plain"]
    with pytest.raises(UnsupportedError, match=r"'lazy' needs lazy_backend, .* No module named 'nothing_of_that_name'"):
        kernel(EVEN, implementation="lazy")
    with pytest.raises(ConfigError, match="'lazy' needs lazy_backend"):
        from_json('{"implementation": "lazy"}', LazyConfig)


def test_a_wrong_declaration_is_an_error_at_once():
    with pytest.raises(KernelError, match="Unnamed must name its own subclass of OperationConfig"):

        class Unnamed(Operation):
            implementations = Implementations({"plain": Plain()})

    with pytest.raises(KernelError, match="ScaleConfig is the configuration type of another operation"):

        class Second(Operation[ScaleConfig, ScaleCall, jax.Array]):
            implementations = Implementations({"plain": Plain()})

    with pytest.raises(KernelError, match=r"each name to the Implementation with that name, got 'p': Plain\('plain'\)"):
        _ = Implementations({"p": Plain()})["p"]


# --- explaining ---


def test_an_explanation_says_why_an_implementation_does_not_run():
    why = default_executor().explain(SCALE, ODD)
    assert why.refusals == {"fast": "length is 7, and 'fast' takes even ones; use 'plain'."}
    assert "  fast       does not run: length is 7" in str(why)
    assert default_executor().explain(SCALE, EVEN).refusals == {}


@pytest.mark.slow
def test_modules_take_an_order_of_preference_too():
    x = jnp.ones((1, 8, 2, 8))
    assert flash_attention(x, x, x, implementation=["cudnn", "xla"]).shape == x.shape
    assert rms_norm(x, x[0, 0, 0], implementation=["xla"]).shape == x.shape
    found = default_executor().explain(functools.partial(flash_attention, implementation=("cudnn", "xla")), x, x, x)
    assert found[0].config.implementation == "xla"


def test_an_implementation_with_the_hooks_of_a_kernel_gets_a_suggestion():
    hooks = {"name": "near", "heuristic_cfg": lambda self, call: 1, "space": lambda self, call: [1]}
    text = "Near.heuristic_cfg is no method of an implementation and is never called; did you mean 'heuristic'?"
    table = Implementations({"near": type("Near", (Implementation,), hooks)()})
    with pytest.warns(KernelWarning, match=re.escape(text)):
        table["near"]
