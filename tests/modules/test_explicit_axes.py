# SPDX-License-Identifier: Apache-2.0
"""Arrays over explicit mesh axes: batch axes are merged where they are, and other shardings are errors with advice."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.arrays import on_device

from ejkernel.kernels._merging import Merging
from ejkernel.modules import (
    DelayedScaling,
    append_to_pages,
    copy_pages,
    flash_attention,
    from_zigzag,
    paged_plan,
    quantize,
    quantized_dense,
    quantized_matmul,
    rms_norm,
    to_zigzag,
)
from ejkernel.ops import ArgumentError, Kernel

pytestmark = [pytest.mark.slow, pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")]
# the second axis alone, and the first two; the first has two entries on each device
SPECS = [(None, "b"), ("a", "b"), ("a", ("c", "b"))]


def mesh_of():
    return jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Explicit,) * 3)


def normal(*shape, seed=0):
    return on_device(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def placed(array, *spec):
    return jax.device_put(array, NamedSharding(mesh_of(), P(*spec)))


def with_gradient(function):
    """Return a function that returns a result and the gradients of all arguments."""

    def run(*args):
        out, back = jax.vjp(function, *args)
        return out, back(jnp.sin(out))

    return jax.jit(run)


def assert_alike(function, args, specs, tolerance=1e-5):
    """Compare results and gradients over explicit axes with those of one device."""
    with jax.set_mesh(mesh_of()):
        given = [placed(x, *spec) for x, spec in zip(args, specs, strict=True)]
        out, gradients = with_gradient(function)(*given)
    assert [jax.typeof(x) for x in gradients] == [jax.typeof(x) for x in given]
    for actual, expected in zip(
        jax.tree.leaves((out, gradients)), jax.tree.leaves(with_gradient(function)(*args)), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("spec", [("a", None), *SPECS])
def test_merged_axes_have_the_elements_of_each_device_and_come_apart_again(spec):
    x = normal(4, 8, 3)
    with jax.set_mesh(mesh_of()):
        array = placed(x, *spec)
        merging = Merging.of(array, 2)
        merged = jax.jit(lambda array: merging.merge("x", array)).lower(array).compile()
        assert "all-" not in merged.as_text()
        assert sorted(map(tuple, merged(array).tolist())) == sorted(map(tuple, x.reshape(32, 3).tolist()))
        np.testing.assert_array_equal(merging.separate(merged(array)), x)


@pytest.mark.parametrize("spec", SPECS)
def test_attention_with_batch_axes_over_explicit_axes_is_that_of_one_device(spec):
    args = normal(4, 4, 8, 4, 8), normal(4, 4, 8, 2, 8, seed=1), normal(4, 4, 8, 2, 8, seed=2)
    lengths, mask = jnp.arange(16).reshape(4, 4) % 9, normal(1, 4, 4, 8, 8, seed=3) > -1

    def attend(query, key, value):
        options = {"key_lengths": lengths, "attention_mask": mask, "causal": True, "return_lse": True}
        out, lse = flash_attention(query, key, value, **options)
        return out + jnp.where(jnp.isfinite(lse), lse, 0).swapaxes(-1, -2)[..., None]

    assert_alike(attend, args, [spec] * 3)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("options", [{}, {"scaling": "delayed"}, {"block": 128}], ids=["rows", "delayed", "blocks"])
def test_dense_layers_with_batch_axes_over_explicit_axes_are_those_of_one_device(spec, options):
    rows, columns = (4, 512) if "block" in options else (4, 8), 128 if "block" in options else 16
    scaling = DelayedScaling.start() if "scaling" in options else None
    dense = functools.partial(quantized_dense, **options | ({"scaling": scaling} if scaling else {}))
    # blocks of rows share a scale, and which rows these are depends on the sharding
    tolerance = 0.05 if "block" in options else 1e-5
    assert_alike(dense, (normal(*rows, columns), normal(columns, columns, seed=1)), (spec, ()), tolerance)


@pytest.mark.parametrize("spec", SPECS)
def test_factors_of_rows_with_batch_axes_over_explicit_axes_are_those_of_one_device(spec):
    w = quantize(normal(16, 24), axis=0)
    run = lambda x, factors: quantized_matmul(x, w, row_scale=factors, activation="silu")  # noqa: E731
    assert_alike(run, (normal(4, 8, 16, seed=1), normal(4, 8, seed=2)), (spec, spec))


def test_a_sequence_over_explicit_axes_is_reordered_and_stays_sharded():
    x = normal(2, 16, 3)
    with jax.set_mesh(mesh_of()):
        given = placed(x, "a", "b")
        found = to_zigzag(given, 2)
        assert jax.typeof(found) == jax.typeof(given)
        np.testing.assert_array_equal(found, to_zigzag(np.asarray(x), 2))
        np.testing.assert_array_equal(from_zigzag(found, 2), x)


def batch(**changed):
    """Return a cache of eight pages, the new tokens of two sequences and their places, each with its sharding."""
    arrays = {
        "kv_pages": jnp.zeros((8, 4, 2, 2, 8)),
        "k": normal(4, 2, 8),
        "v": normal(4, 2, 8, seed=1),
        "page_table": jnp.arange(4).reshape(2, 2),
        "query_offsets": jnp.array([0, 2, 4]),
        "kv_lengths": jnp.array([5, 2]),
    }
    return {name: placed(array, *changed.get(name, ())) for name, array in arrays.items()}


HEADS = {"kv_pages": (None, None, "a"), "k": (None, "a"), "v": (None, "a")}


def test_new_tokens_are_written_to_a_cache_whose_heads_are_over_explicit_axes():
    with jax.set_mesh(mesh_of()):
        found, expected = append_to_pages(**batch(**HEADS)), append_to_pages(**batch())
    assert found.sharding.spec[2] == "a"
    np.testing.assert_array_equal(found, expected)


SINGLE = dict.fromkeys(("k", "v", "page_table", "query_offsets", "kv_lengths"), ("b",))


@pytest.mark.parametrize("changed", [SINGLE, {"kv_pages": ("b",)}, HEADS | {"kv_pages": (None, "b", "a")}])
def test_caches_are_written_in_place_over_axes_of_one_device(changed):
    expected, mesh = append_to_pages(**batch()), jax.make_mesh((8, 1), ("c", "b"), axis_types=(AxisType.Explicit,) * 2)
    expected, pages = copy_pages(expected, jnp.array([1]), jnp.array([3])), [jnp.array([1]), jnp.array([3])]
    specs = {name: [axis if axis == "b" else None for axis in spec] for name, spec in changed.items()}
    with jax.set_mesh(mesh):
        given = {name: jax.device_put(x, NamedSharding(mesh, P(*specs.get(name, ())))) for name, x in batch().items()}
        places = [shard.data.unsafe_buffer_pointer() for shard in given["kv_pages"].addressable_shards]
        kind = jax.typeof(given["kv_pages"])
        found = copy_pages(append_to_pages(**given), *(jax.device_put(x, NamedSharding(mesh, P("b"))) for x in pages))
    assert jax.typeof(found) == kind
    assert places == [shard.data.unsafe_buffer_pointer() for shard in found.addressable_shards]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"page_table": ("a",)},
            r"axis 0 of page_table must be whole on every device; got the sharding P\('a', None\)",
        ),
        ({"kv_lengths": ("a",)}, "axis 0 of kv_lengths must be whole on every device"),
        ({"kv_pages": ("a",)}, "axis 0 of kv_pages must be whole on every device"),
        ({"kv_pages": (None, "a")}, "axis 1 of kv_pages must be whole on every device"),
        ({"k": ("a",)}, "axis 0 of k must be whole on every device"),
        ({"k": (None, "a")}, "axis 1 of k must be whole on every device"),
        (HEADS | {"k": (None, "b")}, "axis 1 of k must be sharded over a like kv_pages, or whole"),
        (HEADS | {"v": ()}, "v must be sharded like k"),
    ],
)
def test_a_cache_says_which_array_to_reshard(changed, words):
    with jax.set_mesh(mesh_of()), pytest.raises(ArgumentError, match=rf"{words}.*jax\.sharding\.reshard"):
        append_to_pages(**batch(**changed))


def test_copies_and_plans_say_which_array_to_reshard():
    with jax.set_mesh(mesh_of()):
        given, pages = batch(kv_pages=("a",), query_offsets=(), kv_lengths=("a",)), placed(jnp.arange(2))
        with pytest.raises(ArgumentError, match="axis 0 of kv_pages must be whole on every device"):
            copy_pages(given["kv_pages"], pages, pages)
        with pytest.raises(ArgumentError, match="axis 0 of kv_lengths must be whole on every device"):
            paged_plan(given["query_offsets"], given["kv_lengths"], heads=4, kv_heads=2, page_size=4)


def test_arrays_whose_batch_axes_are_sharded_differently_are_refused():
    query, key = placed(normal(4, 4, 8, 4, 8), None, "b"), placed(normal(4, 4, 8, 4, 8), None, "c")
    with pytest.raises(
        ArgumentError, match=r"key must be sharded like the first argument .* P\(None, 'b'\); got P\(None, 'c'\)"
    ):
        flash_attention(query, key, query)


def test_dropout_does_not_depend_on_the_sharding_of_batch_axes():
    query, options = placed(normal(4, 4, 8, 4, 8), None, "b"), {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}
    with pytest.raises(ArgumentError, match="dropout_rate must be 0 where batch axes after the first are sharded"):
        flash_attention(query, query, query, **options)


@pytest.mark.parametrize(("batch", "spec"), [((8, 2), ("a", "b")), ((1, 8), (None, "a")), ((8, 1), ("a", "b"))])
def test_dropout_runs_where_shards_keep_the_order_of_examples(batch, spec):
    mesh = jax.make_mesh((8, 1), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    query, options = normal(*batch, 8, 4, 8), {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}
    with jax.set_mesh(mesh):
        array = jax.device_put(query, NamedSharding(mesh, P(*spec)))
        found = flash_attention(array, array, array, **options)
        assert jax.typeof(found) == jax.typeof(array)
    np.testing.assert_allclose(found, flash_attention(query, query, query, **options), atol=1e-5)


class Calls(Kernel):
    """A kernel without a sharding rule that calls an operation."""

    def run(self, x, weight, *, cfg):
        return rms_norm(x, weight, axis=(0, 2))

    def heuristic_cfg(self, inv):
        return ()


def test_shardings_that_jax_rejects_in_a_call_are_errors_with_advice():
    x, weight = placed(normal(4, 8, 6), None, None, "a"), normal(4, 6)
    with pytest.raises(ArgumentError, match=r"rms_norm: JAX rejects the shardings .*use jax\.sharding\.reshard"):
        rms_norm(x, weight, axis=(0, 2))
    # A kernel without a sharding rule gets whole arrays instead.
    np.testing.assert_allclose(Calls("calls")(x, weight), rms_norm(normal(4, 8, 6), weight, axis=(0, 2)), 1e-6)
