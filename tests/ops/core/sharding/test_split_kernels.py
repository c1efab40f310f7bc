# SPDX-License-Identifier: Apache-2.0
"""Users' kernels with a sharding rule: their calls are divided, tuned and explained where several devices run them."""

import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import config as _config
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.cli.files import calls_in_file
from ejkernel.modules import grouped_matmul, paged_attention, paged_plan, rms_norm
from ejkernel.ops import (
    Kernel,
    OfflineWarning,
    ShardingRule,
    ShardingWarning,
    autotune,
    autotune_lowered,
    check_kernel,
    default_executor,
    overlay_cache,
    recording,
    tune,
)
from ejkernel.ops.errors import KernelError
from ejkernel.ops.execution.discovery import discover


class Product(Kernel[int, jax.Array]):
    """A product of matrices in `cfg` pieces; records the shapes it runs with."""

    rule: ShardingRule | None = ShardingRule("m k, k n -> m n", split="m n k")

    def __init__(self, **fields):
        super().__init__(name="product")
        self.seen = []
        self.__dict__.update(fields)

    def sharding_rule(self, inv):
        return self.rule

    def heuristic_cfg(self, inv):
        return 1

    def config_space(self, inv):
        return [1, 2]

    def run(self, x, y, *, cfg, scale=1.0):
        self.seen.append((x.shape, y.shape, cfg))
        return scale * (x @ y)


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


X, Y = random(8, 16), random(16, 8, seed=1)


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind, kind))


def placed(*pairs, mesh=None):
    return [jax.device_put(x, NamedSharding(mesh or mesh_of(), spec)) for x, spec in pairs]


def close(left, right):
    def check(x, y):
        # Sums whose terms cancel are rounded like the largest ones, differently on each processor.
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=max(1e-5, 2e-7 * float(abs(y).max())))

    jax.tree.map(check, left, right)


def gradient(kernel):
    return jax.grad(lambda x, y: (kernel(x, y) ** 2).sum(), argnums=(0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("left", "right", "part"),
    [
        (P("a"), P(), ((4, 16), (16, 8))),
        (P(None, "b"), P("b"), ((8, 4), (4, 8))),
        (P("a", "b"), P("b"), ((4, 4), (4, 8))),
        (P("a"), P(None, "b"), ((4, 16), (16, 2))),
    ],
)
def test_every_device_computes_its_shard_forward_and_backward(left, right, part, kind):
    kernel, mesh = Product(), mesh_of(kind)
    with jax.set_mesh(mesh):
        found = jax.jit(kernel)(*placed((X, left), (Y, right), mesh=mesh))
        gradients = jax.jit(gradient(kernel))(*placed((X, left), (Y, right), mesh=mesh))
    close(found, X @ Y)
    close(gradients, gradient(lambda x, y: x @ y)(X, Y))
    assert part in [seen[:2] for seen in kernel.seen]


def test_eager_call_on_sharded_arrays_is_split_too():
    kernel = Product()
    close(kernel(*placed((X, P("a")), (Y, P()))), X @ Y)
    assert ((4, 16), (16, 8), 1) in kernel.seen


def test_kernel_without_a_rule_sees_the_whole_arrays():
    kernel = Product(rule=None)
    close(jax.jit(kernel)(*placed((X, P("a")), (Y, P()))), X @ Y)
    assert {seen[0] for seen in kernel.seen} == {(8, 16)}


def unruled():
    """Return a product without `sharding_rule`; its gradient rule sums over a dimension that may be sharded."""

    class Unruled(Kernel[int, jax.Array]):
        def heuristic_cfg(self, inv):
            return 1

        def run(self, x, y, *, cfg):
            return jnp.einsum("mk,kn->mn", x, y)

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            (x, y), (dout,) = primals, cotangents
            return jnp.einsum("mn,kn->mk", dout, y), jnp.einsum("mk,mn->kn", x, dout)

    return Unruled(name="unruled")


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [Product(rule=None), unruled()], ids=["no rule for the call", "no rule at all"])
@pytest.mark.parametrize(("left", "right"), [(P("a"), P()), (P("a", "b"), P("b")), (P("a"), P(None, "b"))])
def test_products_over_explicit_axes_without_a_rule_are_those_of_whole_arrays(kernel, left, right):
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        found = jax.jit(jax.value_and_grad(lambda x, y: (kernel(x, y) ** 2).sum(), (0, 1)))(
            *placed((X, left), (Y, right), mesh=mesh)
        )
    close(found, jax.value_and_grad(lambda x, y: ((x @ y) ** 2).sum(), (0, 1))(X, Y))
    shardings = [NamedSharding(mesh, spec) for spec in (left, right)]
    assert all(x.sharding.is_equivalent_to(own, 2) for x, own in zip(found[1], shardings, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(0, None), (None, 1), (0, 0)])
def test_examples_of_vmap_are_divided(axes):
    kernel = Product()
    x, y = random(8, 4, 16), Y
    if axes == (0, 0):
        y = random(8, 16, 8, seed=3)
    x = x if axes[0] == 0 else x[0]
    y = random(16, 8, 8, seed=4) if axes[1] == 1 else y
    mapped = jax.vmap(kernel, in_axes=axes)
    specs = [P(*[None] * axis, ("a", "b")) if axis is not None else P() for axis in axes]
    found = jax.jit(jax.grad(lambda *arrays: (mapped(*arrays) ** 2).sum(), (0, 1)))(
        *placed((x, specs[0]), (y, specs[1]))
    )
    plain = jax.vmap(jnp.matmul, in_axes=axes)
    close(found, jax.grad(lambda *arrays: (plain(*arrays) ** 2).sum(), (0, 1))(x, y))


def vmap_of_gradient(product, x, y, scales):
    gradients = jax.grad(lambda x, y, scale: (product(x, y) * scale).sum(), (0, 1))
    return jax.vmap(gradients, in_axes=(None, None, 0))(x, y, scales)


def vmap_over_examples_of_gradient(product, x, y, scales):
    examples = x[..., None] * scales  # the last axis
    gradients = jax.grad(lambda x, y, scale: (product(x, y) * scale).sum(), (0, 1))
    return jax.vmap(gradients, in_axes=(2, None, 0))(examples, y, scales)


def gradient_of_vmap(product, x, y, scales):
    def loss(x, y):
        return (jax.vmap(product, in_axes=(2, None), out_axes=1)(x[..., None] * scales, y) ** 2).sum()

    return jax.vmap(jax.grad(loss, (0, 1)), in_axes=(None, -1))(x, y[..., None] * scales)


def vmap_of_tangents(product, x, y, scales):
    gradients = jax.grad(lambda x, y, scale: (product(x, y) ** 2 * scale).sum(), (0, 1))
    tangents = lambda scale: jax.jvp(gradients, (x, y, scale), (x, y, scale))[1]  # noqa: E731
    return jax.vmap(tangents)(scales)


def tangents_of_gradient_of_vmap(product, x, y, scales):
    arrays = x[None] * scales[:, None, None], y[None] * scales[:, None, None]
    gradients = jax.grad(lambda x, y: (jax.vmap(product)(x, y) ** 2).sum(), (0, 1))
    return jax.jvp(gradients, arrays, arrays)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    [
        vmap_of_gradient,
        vmap_over_examples_of_gradient,
        gradient_of_vmap,
        vmap_of_tangents,
        tangents_of_gradient_of_vmap,
    ],
)
def test_gradients_and_their_tangents_under_vmap_have_the_explicit_shardings_of_their_arguments(form):
    mesh, scales = mesh_of(AxisType.Explicit), jnp.array([1.0, 2.0, -1.0])
    with jax.set_mesh(mesh):
        arrays = placed((X, P(None, ("a", "b"))), (Y, P("a")), mesh=mesh)  # y's axis is divided further by the call
        found = jax.jit(lambda x, y: form(Product(), x, y, scales))(*arrays)
    close(found, form(jnp.matmul, X, Y, scales))
    assert [P(None, None, ("a", "b")), P(None, "a", None)] == [x.sharding.spec for x in found]


def test_examples_that_have_a_name_stay_together():
    class Centred(Kernel[int, jax.Array]):
        def heuristic_cfg(self, inv):
            return 1

        def run(self, x, *, cfg):
            return x - jax.lax.pmean(x, "examples")

        def sharding_rule(self, inv):
            return ShardingRule("d -> d", split="d")

    mapped = jax.vmap(Centred(), axis_name="examples")
    close(jax.jit(mapped)(*placed((X, P("a", "b")))), X - X.mean(0))


def test_configuration_that_a_caller_insists_on_runs_on_every_device():
    kernel = Product()
    close(jax.jit(lambda x, y: kernel(x, y, cfg=2))(*placed((X, P("a")), (Y, P()))), X @ Y)
    assert ((4, 16), (16, 8), 2) in kernel.seen


def test_each_device_runs_the_tuned_configuration_of_its_shard():
    kernel = Product()
    arrays = placed((X, P("a")), (Y, P()))
    result = autotune(kernel, jax.ShapeDtypeStruct((4, 16), X.dtype), jax.ShapeDtypeStruct((16, 8), X.dtype))
    assert result in (1, 2)
    kernel.seen.clear()
    jax.jit(kernel).lower(*arrays).compile()
    assert {seen[2] for seen in kernel.seen if seen[0] == (4, 16)} == {result}


def test_a_function_is_tuned_for_the_shards_of_its_calls():
    kernel = Product()
    result = autotune(gradient(kernel), *placed((X, P("a")), (Y, P())))
    assert {entry.op_id_v for entry in result.entries} == {"product@v0", "product.bwd@v0"}
    assert {data.config for data in result.searches} <= {1, 2}
    assert ((4, 16), (16, 8)) in [seen[:2] for seen in kernel.seen]


def test_a_lowered_program_is_tuned_for_its_shards_and_a_text_has_none():
    kernel = Product()
    lowered = jax.jit(kernel).lower(*placed((X, P("a")), (Y, P())))
    chain = default_executor().chooser
    assert [entry.op_id_v for entry in autotune_lowered(chain, lowered).entries] == ["product@v0"]
    with pytest.warns(OfflineWarning, match="1 calls of the program split themselves"):
        assert autotune_lowered(chain, lowered.as_text()).entries == ()


def test_the_explanation_describes_the_shard():
    kernel = Product()
    explained = default_executor().explain(jax.jit(kernel), *placed((X, P("a")), (Y, P())))
    part = default_executor().explain(kernel, X[:4], Y)
    assert [each.key for each in explained] == [part.key]
    assert "devices    split m, n, k" in str(part)
    assert "each device computes the whole call" in str(default_executor().explain(Product(rule=None), X, Y))


def test_an_overlay_at_lowering_holds_at_compilation():
    kernel = Product()
    arrays = placed((X, P("a")), (Y, P()))
    key = default_executor().explain(kernel, X[:4], Y).key
    with overlay_cache({key: 2}):
        lowered = jax.jit(kernel).lower(*arrays)
    thread = threading.Thread(target=lowered.compile)
    thread.start()
    thread.join()
    assert ((4, 16), (16, 8), 2) in kernel.seen


def test_an_error_of_a_shard_reaches_the_caller_of_compile():
    class Small(Product):
        def run(self, x, y, *, cfg):
            if x.shape[0] < 8:
                raise ValueError("there are not enough rows")
            return x @ y

    with pytest.raises(ValueError, match="there are not enough rows"):
        jax.jit(Small())(*placed((X, P("a")), (Y, P())))
    close(jax.jit(Product())(*placed((X, P("a")), (Y, P()))), X @ Y)


def test_rule_that_does_not_fit_its_arrays_is_an_error_of_the_kernel():
    with pytest.raises(TypeError, match="product: sharding_rule 'm -> m' has 1 arrays, and the call has 2"):
        jax.jit(Product(rule=ShardingRule("m -> m", split="m")))(*placed((X, P("a")), (Y, P())))
    with pytest.raises(TypeError, match="product: sharding_rule must return a ShardingRule or None, got 'm'"):
        jax.jit(Product(rule="m"))(*placed((X, P("a")), (Y, P())))
    with pytest.raises(KernelError, match="sharding_rule must return a ShardingRule or None, got 'm'"):
        default_executor().explain(Product(rule="m"), X, Y)
    for result in ("m", "m n o"):
        rule = ShardingRule(f"m k, k n -> {result}", split="m")
        with pytest.raises(TypeError, match=f"names the axes of results '{result}', but their shapes are"):
            jax.jit(Product(rule=rule))(*placed((X, P("a")), (Y, P())))


def test_an_exported_program_keeps_the_whole_call_and_warns_once():
    kernel, mesh = Product(), mesh_of()
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P("a"))) for x in (X, Y)]
    with pytest.warns(ShardingWarning, match="product: .* exported"):
        exported = jax.export.export(jax.jit(kernel))(*shapes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.export.export(jax.jit(kernel))(*shapes)
    close(exported.call(*placed((X, P("a")), (Y, P("a")))), X @ Y)


@pytest.mark.slow
def test_check_of_a_kernel_holds_its_rule_against_the_whole_call():
    def rows(kernel):
        report = check_kernel(kernel, X, Y, without=["dtypes", "platforms", "vmap", "pickle", "export"], strict=False)
        return {row.check: row for row in report.rows if row.check.startswith("split")}

    assert {name: row.status for name, row in rows(Product()).items()} == {
        "split along k": "ok",
        "split along m": "ok",
        "split along n": "ok",
    }
    wrong = rows(Product(rule=ShardingRule("m k, l n -> m n", split="l")))
    assert wrong["split along l"].status == "failed"
    assert rows(Product(rule=None))["split"].status == "skipped"


def test_a_program_partitioned_by_gspmd_keeps_the_whole_call_with_a_warning():
    kernel, arrays = Product(_name="product_g"), placed((X, P("a")), (Y, P()))
    with _config.use_shardy_partitioner(False), pytest.warns(ShardingWarning, match="product_g: .* GSPMD"):
        found = jax.jit(kernel)(*arrays)
    close(found, X @ Y)


def test_a_mesh_with_absent_devices_keeps_the_whole_call_with_a_warning():
    kernel = Product(_name="product_m")
    mesh = jax.sharding.AbstractMesh((64,), ("a",), axis_types=(AxisType.Auto,))
    shapes = [jax.ShapeDtypeStruct((64, 64), X.dtype, sharding=NamedSharding(mesh, P("a"))) for _ in range(2)]
    with pytest.warns(ShardingWarning, match="product_m: .* fewer devices"):
        jax.jit(kernel).trace(*shapes).lower(lowering_platforms=("cpu",))
    assert {seen[0] for seen in kernel.seen} == {(64, 64)}


def test_a_mesh_of_another_platform_counts_that_platforms_devices(monkeypatch):
    of = jax.devices
    arrays = placed((X, P("a")), (Y, P()))
    # As on a machine with one GPU, and a program for several devices of the CPU.
    monkeypatch.setattr(jax, "devices", lambda backend=None: of(backend) if backend else of()[:1])
    kernel = Product(_name="product_c")
    close(jax.jit(kernel)(*arrays), X @ Y)
    assert {seen[0] for seen in kernel.seen} > {X.shape}


@pytest.mark.parametrize("rule", [Product.rule, lambda inv: Product.rule])
def test_function_under_tune_may_have_a_rule(rule):
    @tune(space={"pieces": [1, 2]}, sharding_rule=rule)
    def tuned_product(x, y, *, pieces=1):
        return jnp.concatenate([part @ y for part in jnp.split(x, pieces)])

    arrays = placed((X, P("a")), (Y, P()))
    close(jax.jit(tuned_product)(*arrays), X @ Y)
    assert [inv.array_types[0].shape for inv in discover(tuned_product, *arrays)] == [(4, 16)]


def test_an_invalid_rule_of_a_function_is_an_error():
    with pytest.raises(TypeError, match=r"sharding_rule must be .*, or a function that returns one, got 'm'"):

        @tune(space={"pieces": [1, 2]}, sharding_rule="m")
        def twice(x, *, pieces=1):
            return x * 2


class OneArray(Product):
    """A function of one array, with its own rule."""

    def __init__(self, rule, function, name="one_array"):
        super().__init__(rule=ShardingRule(*rule), function=function, _name=name)

    def run(self, x, *, cfg):
        return self.function(x)


def test_a_number_may_be_a_sum_over_all_devices():
    total = OneArray(("m n ->", "m n"), jnp.sum)
    close(jax.jit(total)(*placed((X, P("a", "b")))), X.sum())
    assert [inv.array_types[0].shape for inv in discover(total, *placed((X, P("a", "b"))))] == [(4, 4)]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_booleans_that_would_be_added_up_are_an_error_of_the_rule(kind):
    kernel, mesh = OneArray(("m n -> m", "m n"), lambda x: (x > 0).any(1)), mesh_of(kind)
    with (
        jax.set_mesh(mesh),
        pytest.raises(TypeError, match="sharding_rule allows splitting n, but a boolean result"),
    ):
        jax.jit(kernel)(*placed((X, P(None, "b")), mesh=mesh))


@pytest.mark.slow
def test_random_keys_keep_the_whole_call_with_a_warning():
    kernel = OneArray(("m ->  m _", "m"), jax.vmap(lambda key: jax.random.normal(key, (3,))), name="drawn")
    keys = jax.random.split(jax.random.key(0), 8)
    (arrays,) = placed((keys, P("a")))
    with pytest.warns(ShardingWarning, match="drawn: .* jax.random keys"):
        found = jax.jit(kernel)(arrays)
    close(found, kernel.function(keys))


LOOPS = {
    "map": lambda kernel, x: jax.lax.map(kernel, jnp.stack([x, x])),
    "scan over stacked": lambda kernel, x: jax.lax.scan(lambda c, y: (c + kernel(y), None), x, jnp.stack([x, x]))[0],
    "gradient of a scan": jax.grad(
        lambda kernel, x: jax.lax.scan(lambda c, _: (kernel(c), None), x, length=2)[0].sum(), argnums=1
    ),
    "scan of remat": jax.grad(
        lambda kernel, x: jax.lax.scan(lambda c, _: (jax.checkpoint(kernel)(c), None), x, length=2)[0].sum(), argnums=1
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_shards_in_loops_and_functions_are_found_as_compiled(loop):
    kernel = OneArray(("m n -> m n", "m"), jnp.sin)

    def program(x):
        return LOOPS[loop](kernel, x)

    (x,) = placed((X, P("b")))
    with recording() as compiled:
        jax.jit(program).lower(x).compile()
    found = discover(program, x)
    assert {inv.key for inv in found} == {inv.key for inv in compiled}
    assert {inv.array_types[0].shape for inv in found} == {(2, 16)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_calls_that_a_gradient_makes_are_found_too(kind):
    sizes, mesh = jnp.asarray([5, 3], jnp.int32), mesh_of(kind)
    with jax.set_mesh(mesh):
        arrays = placed((X, P()), (random(2, 16, 8), P(None, None, "b")), mesh=mesh)
        function = jax.grad(lambda x, w: (grouped_matmul(x, w, sizes) ** 2).sum(), argnums=(0, 1))
        with recording() as compiled:
            jax.jit(function).lower(*arrays).compile()
        found = discover(function, *arrays)
    assert {inv.key for inv in found} == {inv.key for inv in compiled}
    assert "grouped_matmul_wgrad" in {inv.op_id for inv in found}


@pytest.mark.slow
def test_16_bit_gradients_are_added_up_beside_automatic_axes():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit, AxisType.Auto))
    x, weight = X.astype(jnp.bfloat16), jnp.ones(16, jnp.bfloat16)
    function = jax.grad(lambda x, w: rms_norm(x, w).sum(), argnums=1)
    with jax.set_mesh(mesh):
        found = jax.jit(function)(*placed((x, P("a")), (weight, P()), mesh=mesh))
    np.testing.assert_allclose(found.astype(jnp.float32), function(x, weight).astype(jnp.float32), atol=0.1)


def test_the_text_of_a_program_with_split_calls_shows_the_shards_to_tune(tmp_path):
    text = tmp_path / "step.mlir"
    text.write_text(jax.jit(Product()).lower(*placed((X, P("a")), (Y, P()))).as_text())
    with pytest.warns(OfflineWarning, match="1 calls of .*step.mlir are partitioned over devices"):
        assert calls_in_file(text).calls == ()


@pytest.mark.slow
def test_16_bit_gradients_are_added_up_inside_a_partly_manual_mesh():
    mesh = mesh_of()
    x, weight = X.astype(jnp.bfloat16), jnp.ones(16, jnp.bfloat16)

    def gradient_of_weight(x, weight):
        return jax.grad(lambda w: rms_norm(x, w).sum())(weight)

    inside = jax.shard_map(gradient_of_weight, mesh=mesh, in_specs=(P("a"), P()), out_specs=P(), axis_names={"a"})
    with jax.set_mesh(mesh):
        found = jax.jit(inside)(*placed((x, P("a", "b")), (weight, P()), mesh=mesh))
    expected = gradient_of_weight(x, weight)
    np.testing.assert_allclose(found.astype(jnp.float32), expected.astype(jnp.float32), atol=0.1)


MIXED = (AxisType.Explicit, AxisType.Auto)


@pytest.mark.slow
@pytest.mark.parametrize(
    "types", [(AxisType.Auto,) * 2, (AxisType.Explicit,) * 2, MIXED], ids=["auto", "explicit", "mixed"]
)
@pytest.mark.parametrize("inner", [0, 16])
def test_arrays_without_rows_are_split(types, inner):
    """XLA aborted the process where some axes of the mesh are explicit and others automatic."""
    mesh, kernel = jax.make_mesh((2, 4), ("a", "b"), axis_types=types), Product()
    function = lambda x, y: (kernel(x, y), gradient(kernel)(x, y))  # noqa: E731
    x, y = random(0, inner), random(inner, 8)
    with jax.set_mesh(mesh):
        arrays = placed((x, P("a")), (y, P()), mesh=mesh)
        found = jax.jit(function)(*arrays)
        assert discover(function, *arrays)
    jax.tree.map(np.testing.assert_array_equal, found, function(x, y))


@pytest.mark.slow
def test_a_plan_of_pages_without_elements_is_split_beside_automatic_axes():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=MIXED)
    args = random(3, 8, 8), random(6, 4, 2, 2, 8), jnp.arange(4).reshape(2, 2), jnp.array([0, 1, 2]), jnp.array([3, 7])

    def attend(q, pages, table, offsets, lengths):
        shape = {"heads": 8, "kv_heads": 2, "page_size": 4, "tokens": 3, "pages": 6}
        plan = paged_plan(offsets, lengths, page_table=table, **shape)
        assert any(0 in array.shape for array in jax.tree.leaves(plan))
        return paged_attention(q, pages, table, offsets, lengths, plan=plan)

    with jax.set_mesh(mesh):
        specs = P(None, "a"), P(None, None, "a"), P(), P(), P()
        found = jax.jit(attend)(*placed(*zip(args, specs, strict=True), mesh=mesh))
    close(found, attend(*args))
