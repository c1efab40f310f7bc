# SPDX-License-Identifier: Apache-2.0
"""The documents of the public API, continued: batches, parameters, serialization, program analysis, best practices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.document_kernels import DOUBLE, MATMUL, A, B, Double, Matmul, MyConfig, X

from ejkernel import ops
from ejkernel.ops import ConfigCache, ConfigKey, ConfigSelectorChain, Invocation


@pytest.fixture
def kernel():
    return Matmul(name="MyKernel")


# --- Batch processing ---


def test_vmap_with_config_selects_once_for_the_whole_batch(page, kernel):
    batched_a, batched_b = np.stack([A, 2 * A, 3 * A]), np.stack([B, B, B])
    with ops.recording() as seen:
        module = page(
            """
            from ejkernel.ops import vmap_with_config

            # Standard vmap would select config per element
            # vmap_with_config selects once and broadcasts
            batched_result = vmap_with_config(
                kernel,
                in_axes=(0, 0),  # Batch over first axis
            )(batched_a, batched_b)
            """,
            kernel=kernel,
            batched_a=batched_a,
            batched_b=batched_b,
        )
    np.testing.assert_array_equal(batched_a @ batched_b, module.batched_result)
    assert [inv.batch_sizes for inv in seen] == [(3,)]


def test_pmap_with_config_runs_across_devices(page, kernel):
    sharded_a, sharded_b = np.stack([A * i for i in range(8)]), np.stack([B] * 8)
    module = page(
        """
        from ejkernel.ops import pmap_with_config

        # Run kernel across multiple devices
        parallel_result = pmap_with_config(
            kernel,
            axis_name='devices'
        )(sharded_a, sharded_b)
        """,
        kernel=kernel,
        sharded_a=sharded_a,
        sharded_b=sharded_b,
    )
    np.testing.assert_array_equal(sharded_a @ sharded_b, module.parallel_result)
    assert len(module.parallel_result.sharding.device_set) == 8


# --- Parameters and utilities ---


def test_attention_parameters_are_created(page):
    module = page(
        """
        from ejkernel.ops import FwdParams, BwdParams

        fwd = FwdParams(
            q_blocksize=128,  # Query block size
            kv_blocksize=256,  # Key-value block size
            num_warps=4,  # GPU warps
            num_stages=2,  # Pipeline stages
        )

        bwd = BwdParams(
            q_blocksize=64,
            kv_blocksize=128,
        )
        """
    )
    assert (
        module.fwd.kv_blocksize,
        module.fwd.num_stages,
        module.bwd.q_blocksize,
        module.bwd.num_warps,
    ) == (256, 2, 64, None)


def test_device_functions_describe_this_device(page):
    module = page(
        """
        from ejkernel.ops import device_kind, get_device_platform, device_fingerprint

        # Get device type
        kind = device_kind()  # Returns "gpu", "tpu", or "cpu"

        # Get platform for dispatch
        platform = get_device_platform()  # Returns "triton", "pallas", or "xla"

        # Unique device identifier (for caching)
        fingerprint = device_fingerprint()
        """
    )
    assert (module.kind, module.platform) in {("gpu", "triton"), ("tpu", "pallas"), ("cpu", "xla")}
    assert module.fingerprint.startswith(f"{module.kind}:")


def test_sharding_enters_the_key(page):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.device_put(A, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
    source = """
        from ejkernel.ops import sharding_fingerprint, default_key_builder_with_sharding

        # Get fingerprint of array sharding
        fingerprint = sharding_fingerprint(array)

        # Build cache key including sharding info
        key = default_key_builder_with_sharding(kernel, args, kwargs)
        """
    module = page(source, array=spread, kernel=MATMUL, args=(spread, B), kwargs={})
    fingerprint, key = module.fingerprint, module.key
    module = page(source, array=A, kernel=MATMUL, args=(A, B), kwargs={})
    assert fingerprint != module.fingerprint
    assert (key.device, key.op) == (module.key.device, module.key.op)
    assert key.call != module.key.call


def test_a_config_goes_to_json_and_back(page):
    module = page(
        """
        from ejkernel.ops import to_json, from_json, stable_json

        # Serialize config to JSON
        json_str = to_json(config)

        # Deserialize
        config = from_json(json_str, MyConfig)

        # Stable JSON (deterministic ordering for cache keys)
        stable_str = stable_json(config)
        """,
        MyConfig=MyConfig,
        config=MyConfig(block_size=32),
    )
    assert MyConfig(block_size=32) == module.config
    assert module.stable_str == '{"algorithm":"default","block_size":32,"num_warps":4}'


# --- Program analysis ---


def test_labels_are_found_in_a_program_and_give_configs(page):
    inv = Invocation(kernel=DOUBLE, args=(X,))
    module = page(
        """
        from ejkernel.ops import (
            find_labels_in_lowered,
            extract_labels_from_hlo_text,
            labels_to_configs
        )

        # Find labeled operations in lowered JAX code
        lowered = jax.jit(fn).lower(args)
        labels = find_labels_in_lowered(lowered)

        # Extract from HLO text
        hlo_text = lowered.as_text("hlo")
        labels_of_text = extract_labels_from_hlo_text(hlo_text)

        # Convert labels to configs
        configs = labels_to_configs(labels)
        """,
        jax=jax,
        fn=Double(),
        args=X,
    )
    text = f"ejkernel_ops#Double@v0:{inv.call_key}"
    assert ([text], [text], [(text, MyConfig())]) == (module.labels, module.labels_of_text, module.configs)


def test_a_label_decorates_a_function(page):
    module = page(
        """
        from ejkernel.ops import label

        # Add label for HLO analysis
        @label("my_attention")
        def my_attention(q, k, v):
            return attention_impl(q, k, v)
        """,
        attention_impl=lambda q, k, v: q + k * v,
    )
    np.testing.assert_array_equal(X + X * X, module.my_attention(X, X, X))
    (text,) = ops.find_labels_in_lowered(jax.jit(module.my_attention).lower(X, X, X))
    assert text.startswith("ejkernel_ops#my_attention@")


def test_label_formats_an_operation_and_a_hash():
    assert "ejkernel_ops#matmul@v1:1a2b3c4d5e6f7g8h" == ops.label("matmul@v1", "1a2b3c4d5e6f7g8h")  # noqa: SIM300


def test_label_takes_a_prefix():
    assert "mine#matmul@v1:1a2b3c4d5e6f7a8b" == ops.label("matmul@v1", "1a2b3c4d5e6f7a8b", prefix="mine")  # noqa: SIM300


def test_metadata_page_reads_labels_and_configs_of_a_program(page, capsys):
    selector = ops.default_executor().chooser
    module = page(
        """
        op_label = label('matmul@v1', '1a2b3c4d5e6f7g8h')
        print(op_label)

        lowered = jax.jit(my_function).lower(args)
        labels = find_labels_in_lowered(lowered)

        configs = labels_to_configs(lowered, selector)
        """,
        jax=jax,
        label=ops.label,
        find_labels_in_lowered=ops.find_labels_in_lowered,
        labels_to_configs=ops.labels_to_configs,
        selector=selector,
        my_function=Double(),
        args=X,
    )
    assert capsys.readouterr().out == "ejkernel_ops#matmul@v1:1a2b3c4d5e6f7g8h\n"
    assert [(text, MyConfig()) for text in module.labels] == module.configs


def test_labels_without_a_cached_config_give_none(chain):
    text = "ejkernel_ops#matmul@v1:0123456789abcdef"
    assert [(text, None)] == ops.labels_to_configs([text], chain)


def test_offline_page_tunes_a_lowered_program_and_applies_the_result(page, kernel, executor, chain):
    with ops.recording():
        module = page(
            """
            lowered = jax.jit(my_function).lower(example_args)
            result = autotune_lowered(selector, lowered)
            with result:  # Apply optimized configurations
                output = jax.jit(my_function)(real_args)
            """,
            jax=jax,
            autotune_lowered=ops.autotune_lowered,
            selector=chain,
            my_function=lambda a: executor(kernel, a, B),
            example_args=A,
            real_args=2 * A,
        )
    np.testing.assert_array_equal(2 * A @ B, module.output)
    assert [entry.op_id_v for entry in module.result.entries] == ["MyKernel@v0"]


def test_an_environment_variable_enables_recording_for_the_offline_page(page, kernel, executor, chain, monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    module = page(
        """
        lowered = jax.jit(my_model).lower(example_input)
        result = autotune_lowered(selector, lowered)
        with result:
            # Runs with optimized configurations
            output = jax.jit(my_model)(real_input)
        """,
        jax=jax,
        autotune_lowered=ops.autotune_lowered,
        selector=chain,
        my_model=lambda a: executor(kernel, a, B),
        example_input=A,
        real_input=A,
    )
    assert len(module.result.entries) == 1


@pytest.mark.parametrize(
    ("stamp", "labels", "shows_the_call"), [("hash", 1, False), ("json", 1, True), ("none", 0, False)]
)
def test_an_environment_variable_controls_the_labels_of_a_program(executor, monkeypatch, stamp, labels, shows_the_call):
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", stamp)
    text = jax.jit(lambda x: executor(DOUBLE, x)).lower(X).as_text()
    payload = text.partition("#Double@v0:")[2].partition("}")[0]
    assert (len(ops.find_labels_in_lowered(text)), "float32" in payload) == (labels, shows_the_call)


# --- Best practices ---


def test_flash_attention_is_a_module(page):
    q = k = v = jnp.ones((1, 16, 2, 32), jnp.float32)
    output = page(
        """
        # Recommended for most users
        from ejkernel.modules import flash_attention
        output = flash_attention(q, k, v, causal=True)
        """,
        q=q,
        k=k,
        v=v,
    ).output
    np.testing.assert_allclose(v, output, rtol=1e-6)


@pytest.mark.parametrize(("length", "block"), [(2048, 256), (512, 128), (16, 64)])
def test_a_heuristic_considers_shapes(page, executor, length, block):
    module = page(
        """
        def heuristic_cfg(self, inv):
            # Consider input shapes
            q = inv.args[0]
            batch, seq_len, heads, dim = q.shape

            # Larger sequences benefit from larger blocks
            if seq_len >= 2048:
                block = 256
            elif seq_len >= 512:
                block = 128
            else:
                block = 64

            return MyConfig(block_size=block)
        """,
        MyConfig=MyConfig,
    )
    kernel = type("Attention", (Double,), {"heuristic_cfg": module.heuristic_cfg})()
    q = jax.ShapeDtypeStruct((1, length, 2, 32), jnp.float32)
    assert MyConfig(block_size=block) == executor.choose_config(kernel, q)


def test_only_shapes_and_dtypes_decide_a_key():
    keys = [Invocation(kernel=DOUBLE, args=(x,)).key for x in (X, X + 1, jnp.asarray(X))]
    assert [keys[0]] * 3 == keys


def test_calls_run_under_the_profiler(page, executor, tmp_path):
    module = page(
        """
        with jax.profiler.trace("/tmp/jax-trace"):
            result = executor(kernel, args)
        """.replace("/tmp/jax-trace", str(tmp_path)),
        jax=jax,
        executor=executor,
        kernel=DOUBLE,
        args=X,
    )
    np.testing.assert_array_equal(2 * X, module.result)


# --- Constructors that the documents' sources use ---


def test_an_entry_and_a_result_are_built_from_their_fields():
    entry = ops.Entry("matmul@v1", "0123456789abcdef", MyConfig())
    result = ops.AutotuningResult("cpu:some", (entry,))
    assert ("cpu:some", (entry,)) == (result.device, result.entries)


def test_caches_take_the_parts_of_a_key(tmp_path):
    key = ("cpu:some", "matmul@v1", "0123456789abcdef")
    for cache in (ConfigCache(), ops.PersistentCache(tmp_path)):
        cache.put(*key, MyConfig())
        assert [MyConfig()] * 2 == [cache.get(*key), cache.get(ConfigKey(*key))]


def test_an_invocation_can_be_made_without_a_kernel():
    inv = Invocation(op_id="matmul", args=(A, B), kwargs={}, batch_axes=None, override_cfg=None, stamp=False)
    assert ("matmul@v0", inv.abstract_args) == (inv.op_id_v, Invocation(kernel=MATMUL, args=(A, B)).abstract_args)


def test_a_chain_shows_its_tuner_persistent_cache_and_whether_it_persists(tmp_path):
    tuner, persistent = ops.Autotuner(), ops.PersistentCache(tmp_path)
    chain = ConfigSelectorChain(persistent=persistent, tuner=tuner, persist_autotune=False)
    assert (tuner, persistent, False) == (chain.tuner, chain.persistent, chain.persist_autotune)
