# SPDX-License-Identifier: Apache-2.0
"""`quantize`, `Quantized` and `quantized_matmul`: error bounds, pytrees, sharding, and rejected arguments."""

from __future__ import annotations

import types

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.arrays import on_device, ones

from ejkernel.modules import Quantized, QuantizedMatmul, quantize, quantized_matmul
from ejkernel.ops import ArgumentError, CallError, UnsupportedError

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
# Half a unit in the last place, relative to the number and to the scale.
ROUNDING = {E4M3: (2.0**-4, 2.0**-10), E5M2: (2.0**-3, 2.0**-17), "int8": (0.0, 0.5)}


def normal(*shape, seed=0, dtype=jnp.float32):
    return on_device(np.random.default_rng(seed).standard_normal(shape), dtype)


def plain(x, w):
    left, right = (a.dequantize() if isinstance(a, Quantized) else a.astype(jnp.float32) for a in (x, w))
    return jnp.matmul(left, right, precision="highest")


dequantized = jax.jit(Quantized.dequantize)


def assert_near(actual, expected, tolerance=1e-5):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


# --- quantising ---


@pytest.mark.slow
@given(data=st.data(), dtype=st.sampled_from(list(ROUNDING)), scale_dtype=st.sampled_from(["float32", "bfloat16"]))
def test_no_error_exceeds_half_a_unit_in_the_last_place(data, dtype, scale_dtype):
    shape = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 40)))
    block = data.draw(st.sampled_from([None, 1, 7, 16, 64]))
    axis = data.draw(st.sampled_from([-1, 0, (0, 1), None]))
    exponent = data.draw(st.integers(-60, 60))
    random = data.draw(st.booleans())
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = (rng.standard_normal(shape) * 2.0 ** (exponent + rng.integers(-8, 8, shape))).astype(np.float32)
    key = jax.random.key(0) if random else False
    options = {"dtype": dtype, "block": block, "axis": axis, "scale_dtype": scale_dtype, "stochastic": key}
    made = jax.jit(lambda x: quantize(x, **options))(x)  # one program, rather than one for each operation
    found = np.asarray(dequantized(made), np.float64)
    each = dequantized(Quantized(on_device(np.ones(shape), made.dtype), made.scale, made.block))
    relative, absolute = ROUNDING[dtype]
    allowed = np.maximum(relative * np.abs(x), absolute * np.asarray(each, np.float64)) * (2 if random else 1)
    # A bfloat16 scale that was rounded down leaves the largest numbers 0.4 % too small.
    allowed += np.abs(x) * (2.0**-8 if scale_dtype == "bfloat16" else 1e-6)
    assert (np.abs(found - x) <= allowed).all()


@pytest.mark.slow
def test_random_rounding_has_the_right_mean():
    x = jnp.full((1, 4000), 0.37).at[0, 0].set(100.0)
    for dtype in ROUNDING:
        made = quantize(x, dtype=dtype, stochastic=jax.random.key(1)).dequantize()[0, 1:]
        assert len(set(np.asarray(made).tolist())) == 2
        assert_near(made.mean(), 0.37, 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_a_key_of_old_style_rounds_as_that_of_new_style(impl):
    key = jax.random.key(3, impl=impl)
    new, old = (quantize(normal(3, 8), stochastic=k).values for k in (key, jax.random.key_data(key)))
    np.testing.assert_array_equal(new, old)


def test_zeros_stay_zero_and_nan_spoils_its_block_alone():
    x = jnp.zeros((3, 8)).at[1, 2].set(jnp.nan).at[2, 0].set(jnp.inf).at[2, 7].set(3.0)
    for dtype in ROUNDING:
        found = quantize(x, dtype=dtype, block=4).dequantize()
        assert (found[0] == 0).all()
        assert jnp.isnan(found[1, :4]).all()
        assert (found[1, 4:] == 0).all()
        assert jnp.isnan(found[2, :4]).all()
        assert_near(found[2, 4:], x[2, 4:], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"axis": (0, 1)}, {}, {"axis": 0}, {"axis": (0, 1), "block": None}], ids=str)
def test_nan_spoils_large_blocks_too(options):
    scale = quantize(jnp.ones((128, 256)).at[1].set(jnp.nan), **{"block": 128, **options}).scale
    blocks = scale[:1] if scale.shape[0] == 1 else scale[1]
    assert jnp.isnan(blocks).all()


def test_quantized_numbers_print_their_types():
    found = quantize(jnp.ones((256, 128)), dtype=jnp.int8, axis=-1)
    assert repr(found) == "Quantized(values=int8[256, 128], scale=float32[256, 1], block=(1, None))"
    assert repr(jax.tree.map(lambda _: 0, found)) == "Quantized(values=0, scale=0, block=(1, None))"


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda x, q: x @ q, r"operator @: use quantized_matmul\(x, w\)"),
        (lambda x, q: jax.jit(lambda x: q @ x)(x), "operator @: use"),
        (lambda x, q: np.asarray(x) @ q, "operator @: use"),
        (lambda x, q: np.asarray(x) * q, r"operator \*: dequantize\(\) returns an array"),
        (lambda x, q: 2 * q, r"operator \*: dequantize"),
        (lambda x, q: q / 2, r"operator /: dequantize"),
        (lambda x, q: x + q, r"operator \+: dequantize"),
        (lambda x, q: x - q, r"operator -: dequantize"),
        (lambda x, q: -q, r"operator -: dequantize"),
    ],
)
def test_operators_say_what_to_use(use, text):
    with pytest.raises(CallError, match=f"^Quantized has no {text}"):
        use(jnp.ones((8, 8)), quantize(jnp.ones((8, 8))))


@pytest.mark.parametrize("dtype", ["bf16", 3, "int8", None.__class__, jnp.ones(3)])
def test_a_wrong_dtype_of_dequantize_is_named(dtype):
    made = quantize(jnp.ones((8, 8)))
    with pytest.raises(ArgumentError, match=r"^dtype must be a floating-point dtype, e.g. 'bfloat16'; got"):
        made.dequantize(dtype)
    assert made.dequantize("bfloat16").dtype == jnp.bfloat16


def test_a_number_is_quantised_without_axes():
    assert float(quantize(jnp.float32(-3.0), axis=None).dequantize()) == pytest.approx(-3.0)


def test_outside_of_jit_an_array_is_quantised_by_one_program(caplog):
    x = normal(7, 23)
    with jax.log_compiles():
        quantize(x, dtype="int8", block=5)
    assert len([record for record in caplog.records if "Finished XLA compilation" in record.getMessage()]) == 1


@pytest.mark.slow
def test_a_last_block_may_be_shorter():
    made = quantize(normal(300, 5), block=(128, None), axis=(0, 1))
    assert made.scale.shape == (3, 1)
    np.testing.assert_allclose(made.scale[2, 0], jnp.abs(normal(300, 5)[256:]).max() / 448, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("block", [100, 1 << 40])
def test_a_block_longer_than_its_axis_needs_no_padding(block):
    x = normal(3, 8)
    found = quantize(x, block=(None, block), axis=(0, 1))
    assert (found.block, found.scale.shape) == ((None, block), (1, 1))
    np.testing.assert_array_equal(found.dequantize(), quantize(x, axis=None).dequantize())


def test_quantised_arrays_pass_through_jit_vmap_and_scan():
    x, made = normal(3, 4, 256), quantize(normal(3, 4, 256), block=(1, 128), axis=(1, 2))
    assert made.block == (1, 1, 128)
    own = Quantized(made.values, made.scale, made.block[1:])  # as one example has it
    mapped = jax.vmap(lambda x: quantize(x, block=128))(x)
    for found in (jax.jit(lambda q: q)(own), mapped, jax.tree.map(lambda x: x, own)):
        assert found.block == (1, 128)
        np.testing.assert_array_equal(found.dequantize(), made.dequantize())
    _, each = jax.lax.scan(lambda carry, q: (carry, q.dequantize()), 0, own)
    np.testing.assert_array_equal(each, made.dequantize())
    assert hash(jax.tree.structure(own)) == hash(jax.tree.structure(mapped))
    assert jax.tree.structure(own) != jax.tree.structure(made)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((E4M3, "float32", (4, 1), (1, 8)), r"^scale must be float32 or bfloat16 of shape \(4, 2\): blocks \(1, 8\)"),
        ((E4M3, "float32", (4, 1), (1, 0)), "^block must be a tuple of positive"),
        ((E4M3, "float32", (4, 1), [1, None]), "^block must be a tuple of positive"),
        ((E4M3, "float16", (4, 1), (1, None)), r"^scale must be .* got float16\[4, 1\]"),
        (("float32", "float32", (4, 1), (1, None)), r"^values must have dtype .* got float32\[4, 16\]"),
    ],
)
def test_quantised_arrays_are_checked_where_they_are_made(parts, message):
    dtype, scale_dtype, shape, block = parts
    with pytest.raises(ArgumentError, match=message):
        Quantized(jnp.ones((4, 16), dtype), jnp.ones(shape, scale_dtype), block)


def test_leaves_of_quantised_arrays_may_be_anything():
    made = quantize(normal(4, 256), block=128)
    assert jax.tree.map(lambda leaf: None, made).block == (1, 128)
    assert Quantized(P("a"), P(), (1, None)).scale == P()
    assert [str(path) for path, _ in jax.tree_util.tree_flatten_with_path(made)[0]] == [
        "(GetAttrKey(name='values'),)",
        "(GetAttrKey(name='scale'),)",
    ]
    gradient = jax.grad(lambda q: q.scale.sum(), allow_int=True)(quantize(normal(4, 256), dtype="int8"))
    assert gradient.values.dtype == jax.dtypes.float0


@pytest.mark.slow
def test_programs_of_quantised_arrays_are_exported():
    x, w = normal(4, 256), quantize(normal(8, 256, seed=1), block=(8, 128), axis=(0, 1))
    program = jax.jit(lambda x, w: (quantized_matmul(x, w, transpose_w=True), quantize(x, block=128)))
    stored = jax.export.export(program)(x, w).serialize()
    found, rows = jax.export.deserialize(stored).call(x, w)
    expected = program(x, w)
    np.testing.assert_array_equal(found, expected[0])
    assert rows.block == (1, 128)
    np.testing.assert_array_equal(rows.dequantize(), expected[1].dequantize())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_exported_programs_with_a_fixed_operand_are_differentiated(dtype):
    x, w = normal(4, 256), quantize(normal(8, 256, seed=1), dtype=dtype)
    program = lambda x, w: quantized_matmul(x, jax.lax.stop_gradient(w), transpose_w=True)  # noqa: E731
    stored = jax.export.export(jax.jit(program))(x, w).serialize(vjp_order=1)
    found, back = jax.vjp(jax.export.deserialize(stored).call, x, w)
    np.testing.assert_array_equal(found, program(x, w))
    gradient, none = back(found)
    np.testing.assert_array_equal(gradient, jax.vjp(program, x, w)[1](found)[0])
    assert not none.scale.any()


@pytest.mark.slow
@pytest.mark.parametrize("wide", [None, "x", "w"])
def test_rows_of_the_result_take_factors(wide):
    x, w, factors = normal(2, 8, 256), normal(32, 256, seed=1), normal(2, 8, seed=2)
    rows, matrix = x if wide == "x" else quantize(x, block=128), w if wide == "w" else quantize(w, block=128)
    run = lambda f: quantized_matmul(  # noqa: E731
        rows, matrix, row_scale=f, transpose_w=True, preferred_element_type="float32"
    )
    expected = plain(rows, matrix.mT if wide == "w" else matrix.dequantize().mT)
    assert_near(run(factors), expected * factors[..., None])
    if wide is None:
        assert_near(jax.grad(lambda f: run(f).sum())(factors), expected.sum(-1))
        silu = quantized_matmul(
            rows, matrix, activation="silu", row_scale=factors, transpose_w=True, preferred_element_type="float32"
        )
        assert_near(silu, jax.nn.silu(expected) * factors[..., None])
        with pytest.raises(ArgumentError, match=r"row_scale must be None with quantize, got an array float32\[2, 8\]"):
            quantized_matmul(rows, matrix, row_scale=factors, transpose_w=True, quantize="int8")
    with pytest.raises(ArgumentError, match=r"row_scale must be an array of shape \(2, 8\), .*; got float32\[8\]"):
        run(factors[0])


@pytest.mark.slow
@pytest.mark.parametrize("axis", [-1, None, (0, 2), (1, 2)])
@pytest.mark.parametrize("lead", [(1, 4), (4, 1), (2, 3)])
def test_leading_axes_may_share_scales(lead, axis):
    """An axis of one element has one scale whether it counts as whole or not."""
    x, w = quantize(normal(*lead, 64), axis=axis), quantize(normal(64, 8, seed=1), axis=0)
    found = quantized_matmul(x, w, preferred_element_type="float32")
    assert_near(found, plain(x, w))
    apart = quantized_matmul(x.values, w, x_scale=x.scale, preferred_element_type="float32")
    np.testing.assert_array_equal(apart, found)
    ones = jnp.ones(lead)
    assert_near(quantized_matmul(x, w, row_scale=ones, preferred_element_type="float32"), plain(x, w))


@pytest.mark.parametrize("layers", [1, 2])
def test_scales_of_any_number_of_layers_are_scanned(layers):
    x, stacked = normal(4, 64), quantize(normal(layers, 64, 8), axis=1)
    array = types.SimpleNamespace(qvalue=stacked.values, scale=stacked.scale)
    scan = lambda w: jax.lax.scan(lambda carry, w: (carry, quantized_matmul(x, w)), 0, w)[1]  # noqa: E731
    np.testing.assert_array_equal(scan(Quantized.from_qwix(array)), scan(stacked))


@pytest.mark.parametrize("inner", [131072, 133144])
def test_sums_of_the_least_int8_number_do_not_overflow(inner):
    x = jnp.full((1, inner), -128, "int8")
    found = quantized_matmul(x, x, x_scale=1, w_scale=1, transpose_w=True, preferred_element_type="float32")
    np.testing.assert_array_equal(found, [[inner * 2.0**14]])


@pytest.mark.slow
def test_layers_take_stacked_matrices_apart():
    x, stacked = normal(16, 64), quantize(normal(3, 64, 64), block=(32, 32), axis=(1, 2))
    rows = quantize(x, block=32)
    apart = [jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(3)]
    expected = jnp.stack([plain(rows, w) for w in apart])
    product = lambda w: quantized_matmul(rows, w, preferred_element_type="float32")  # noqa: E731
    assert_near(jnp.stack([product(w) for w in apart]), expected)
    assert_near(jax.vmap(product)(stacked), expected)
    assert_near(jax.lax.scan(lambda carry, w: (carry, product(w)), 0, stacked)[1], expected)


@pytest.mark.slow
def test_qwix_arrays_are_converted_both_ways(monkeypatch):
    qwix = types.ModuleType("qwix")
    qwix.QArray = lambda qvalue, scale, zero_point=None: types.SimpleNamespace(
        qvalue=qvalue, scale=scale, zero_point=zero_point
    )
    monkeypatch.setitem(__import__("sys").modules, "qwix", qwix)
    made = quantize(normal(8, 256), block=128)
    array = made.to_qwix()
    assert Quantized.from_qwix(array).block == (1, 128)
    np.testing.assert_array_equal(quantized_matmul(normal(2, 8), array), quantized_matmul(normal(2, 8), made))
    with pytest.raises(ArgumentError, match="block must divide the shape"):
        quantize(normal(8, 200), block=128).to_qwix()
    with pytest.raises(ArgumentError, match="zero_point must be None"):
        Quantized.from_qwix(qwix.QArray(made.values, made.scale, made.scale))
    for other in (3, types.SimpleNamespace(qvalue=made.values)):
        with pytest.raises(ArgumentError, match=r"array must be a qwix\.QArray, with qvalue and scale; got"):
            Quantized.from_qwix(other)


# --- products ---


@pytest.mark.slow
def test_a_scale_may_be_a_python_number():
    x = jnp.ones((2, 4), E4M3)
    found = quantized_matmul(x, jnp.ones((4, 3), E4M3), x_scale=2, w_scale=0.5)
    np.testing.assert_array_equal(found, jnp.full((2, 3), 4.0))
    with pytest.raises(ArgumentError, match=r"x must be an array and x_scale an array or a number; got .* and bool"):
        quantized_matmul(x, x.T, x_scale=True, w_scale=1.0)


@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize("columns", [0, 3])
def test_scales_of_no_rows_or_columns_have_no_numbers(rows, columns):
    x, w = jnp.ones((rows, 8), E4M3), jnp.ones((columns, 8), E4M3)
    for scales in ((jnp.ones(rows), jnp.ones(columns)), (jnp.ones((rows, 1)), jnp.ones((columns, 1)))):
        found = quantized_matmul(x, w, x_scale=scales[0], w_scale=scales[1], transpose_w=True)
        np.testing.assert_array_equal(found, jnp.full((rows, columns), 8.0))
    with pytest.raises(ArgumentError, match=r"sizes that divide \(4, 8\); got float32\[0, 1\]"):
        quantized_matmul(jnp.ones((4, 8), E4M3), w, x_scale=jnp.ones((0, 1)), w_scale=1.0, transpose_w=True)


@pytest.mark.slow
@pytest.mark.parametrize("entries", [2, 64])
def test_a_vector_of_scales_has_one_for_each_column(entries):
    """A vector for `k` must not count as scales of blocks of columns."""
    x, w = jnp.ones((4, 64), jnp.bfloat16), jnp.ones((128, 64), jnp.int8)
    with pytest.raises(ArgumentError, match="w_scale must be a number, a vector of 128 numbers"):
        quantized_matmul(x, w, w_scale=jnp.ones(entries), transpose_w=True)


@pytest.mark.parametrize("flag", [np.True_, jnp.asarray(True)], ids=["NumPy", "JAX"])
def test_scales_of_columns_follow_a_flag_of_any_kind(flag):
    """With as many columns as `k`, the axis of a vector of scales depends on `transpose_w` alone."""
    x, w = jnp.eye(8, dtype="int8"), jnp.ones((8, 8), jnp.int8)
    found = quantized_matmul(x, w, x_scale=np.float32(1), w_scale=jnp.arange(8.0), transpose_w=flag)
    np.testing.assert_array_equal(found, jnp.broadcast_to(jnp.arange(8.0), (8, 8)))


def test_a_plain_array_takes_its_scale_by_shape():
    x, w = quantize(normal(8, 256), block=128), quantize(normal(256, 6, seed=1), axis=0)
    for scale in (w.scale, w.scale[0]):
        found = quantized_matmul(x.values, w.values, x_scale=x.scale, w_scale=scale, preferred_element_type="float32")
        assert_near(found, plain(x, w))
    whole = quantize(normal(256, 6), axis=None)
    found = quantized_matmul(normal(8, 256), whole.values, w_scale=whole.scale.reshape(()))
    assert_near(found, plain(normal(8, 256), whole))


@pytest.mark.slow
def test_gradients_of_wide_operands_are_products_with_the_other():
    x, w = normal(2, 8, 256), quantize(normal(256, 6, seed=1), block=(128, 4), axis=(0, 1))
    found = jax.grad(lambda x: jnp.sin(quantized_matmul(x, w)).sum())(x)
    assert_near(found, jax.grad(lambda x: jnp.sin(plain(x, w)).sum())(x))
    q, wide = quantize(normal(8, 256), block=128), normal(6, 256, seed=1)
    found = jax.grad(lambda w: jnp.sin(quantized_matmul(q, w, transpose_w=True)).sum())(wide)
    assert_near(found, jax.grad(lambda w: jnp.sin(plain(q, w.T)).sum())(wide))


def test_differentiating_a_quantised_operand_raises():
    x, w = normal(4, 16), normal(16, 6)
    with pytest.raises(UnsupportedError, match="quantize has no gradient"):
        jax.grad(lambda w: quantized_matmul(x, quantize(w, axis=0)).sum())(w)
    made = quantize(w, axis=0)
    for change in (lambda s: Quantized(made.values, s, made.block), lambda s: made.values):
        with pytest.raises(UnsupportedError, match="a quantised operand has no gradient"):
            jax.grad(lambda s, change=change: quantized_matmul(x, *_given(change(s), s)).sum())(made.scale)


def _given(w, scale):
    return (w,) if isinstance(w, Quantized) else (Quantized(w, scale, (None, 1)),)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [("m", "n", None), (None, "n", "k"), ("m", None, "k"), (("m", "n"), None, None)])
@pytest.mark.parametrize("kind", ["rows", "blocks", "ragged"])
def test_calls_over_a_mesh_split_by_rows_columns_and_k(spec, kind):
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices")
    mesh = jax.make_mesh((2, 2, 2), ("m", "n", "k"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    rows, columns, inner = spec
    k = 192 if kind == "ragged" else 256
    x, w = normal(8, k), normal(k, 256, seed=1)
    more = {"block": 128} if kind != "rows" else {}
    q, r = quantize(x, **more), quantize(w, axis=(0, 1) if more else 0, **more)
    placed = Quantized(
        jax.device_put(q.values, NamedSharding(mesh, P(rows, inner))),
        jax.device_put(q.scale, NamedSharding(mesh, P(rows, None))),
        q.block,
    )
    other = Quantized(
        jax.device_put(r.values, NamedSharding(mesh, P(inner, columns))),
        jax.device_put(r.scale, NamedSharding(mesh, P(None, None))),
        r.block,
    )
    found = jax.jit(lambda x, w: quantized_matmul(x, w, preferred_element_type="float32"))(placed, other)
    assert_near(found, plain(q, r))


@pytest.mark.slow
def test_shards_of_blocks_must_begin_and_end_with_a_block():
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    mesh = jax.make_mesh((4,), ("k",), axis_types=(jax.sharding.AxisType.Auto,))
    x, w = quantize(normal(4, 384), block=128), quantize(normal(384, 8), axis=0)

    def local(values, scale, w, w_scale):
        product = quantized_matmul(Quantized(values, scale, x.block), Quantized(w, w_scale, w_block))
        return jax.lax.psum(product, "k")

    w_block = w.block
    run = jax.shard_map(local, mesh=mesh, in_specs=(P(None, "k"), P(), P("k"), P()), out_specs=P())
    with pytest.raises(ArgumentError, match="a shard must begin and end with a block"):
        run(x.values, x.scale, w.values, w.scale)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: {"x": normal(4, 16), "w": normal(16, 4)}, "x or w must be quantised"),
        (lambda: {"w": quantize(normal(8, 4))}, r"x must be \[..., k\] and w \[k, n\] with the same k, got .*\[8, 4\]"),
        (lambda: {"w": quantize(normal(2, 16, 4))}, r"w a matrix"),
        (lambda: {"accumulation": "coarse"}, "accumulation must be one of exact, fast"),
        (lambda: {"transpose_w": 1}, "transpose_w must be True or False"),
        (
            lambda: {"w": jnp.ones((4, 16), "int8"), "w_scale": jnp.ones(4), "transpose_w": 1},
            "transpose_w must be True or False",
        ),
        (
            lambda: {"w": jnp.ones((16, 4), "int8"), "w_scale": jnp.ones(4, "int32")},
            "w_scale must have dtype float32 or bfloat16, got int32",
        ),
        (
            lambda: {"preferred_element_type": "int32"},
            "preferred_element_type must be one of bfloat16, float16, float32",
        ),
        (lambda: {"x": quantize(normal(4, 16)).values}, r"x_scale must be given, .* float8_e4m3fn\[4, 16\]; pass"),
        (lambda: {"x": normal(4, 16), "x_scale": jnp.ones(4)}, "x_scale must be None, because x is float32"),
        (lambda: {"x_scale": jnp.ones(4)}, "x_scale must be None, because x is Quantized"),
        (lambda: {"x": quantize(normal(4, 16)).values, "x_scale": jnp.ones((4, 3))}, "sizes that divide"),
        (lambda: {"x": quantize(normal(2, 4, 16), axis=1, block=2)}, "x must be one row high, .*; use quantize"),
        (lambda: {"x": jnp.ones((4, 16), "int16")}, "x must be Quantized, or an array in bfloat16"),
    ],
)
def test_rejected_arguments_are_named(change, message):
    call = {"x": quantize(normal(4, 16)), "w": quantize(normal(16, 4), axis=0)} | change()
    with pytest.raises(ArgumentError, match=message):
        quantized_matmul(call.pop("x"), call.pop("w"), **call)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int4"}, "dtype must be one of float8_e4m3fn, float8_e5m2, int8"),
        ({"scale_dtype": "float16"}, "scale_dtype must be one of float32, bfloat16"),
        ({"axis": 2}, "axis must be axes of x, which has 2"),
        ({"axis": (0, -2)}, "axis must name each axis once"),
        ({"axis": ()}, r"axis must name an axis along which elements share a scale, or be None; got \(\)"),
        ({"block": 0}, "block must be a positive integer or None"),
        ({"block": (1, 2)}, "block must be a positive integer or None for each axis"),
        ({"block": b"x"}, "block must be a positive integer or None for each axis"),
        ({"stochastic": True}, "stochastic must be one PRNG key"),
        ({"stochastic": 0}, "stochastic must be one PRNG key or False, got 0"),
        ({"stochastic": jax.random.split(jax.random.key(0))}, "stochastic must be one PRNG key or False, got"),
        ({"x": ones((2, 2), "int32")}, "x must be a floating-point array"),
    ],
)
def test_rejected_arguments_of_quantize_are_named(change, message):
    call = {"x": normal(4, 16)} | change
    with pytest.raises(ArgumentError, match=message):
        quantize(call.pop("x"), **call)


@pytest.mark.slow
def test_keys_tell_blocks_dtypes_and_accumulation_apart():
    operation = QuantizedMatmul()
    x, w = quantize(normal(4, 256)), quantize(normal(256, 4), axis=0)

    def key(x, w, **options):
        args = (x.values, w.values, x.scale, w.scale)
        args, kwargs = operation.prepare(*args, x_block=x.block, w_block=w.block, **options)
        return str([(a.shape, a.dtype) for a in args]) + str(sorted(kwargs.items()))

    calls = [
        key(x, w),
        key(x, w, accumulation="fast"),
        key(quantize(normal(4, 256), block=256), w),
        key(quantize(normal(4, 256), dtype="int8"), w),
        key(x, w, preferred_element_type="float32"),
    ]
    assert len(set(calls)) == len(calls)
    assert key(x, w) == key(x, w, accumulation="exact", preferred_element_type=jnp.bfloat16, transpose_w=False)
