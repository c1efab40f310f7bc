# SPDX-License-Identifier: Apache-2.0
"""The documents of the public API, example by example: each runs as it is written, given the names it assumes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.document_kernels import DOUBLE, MATMUL, A, B, MyConfig, X

from ejkernel import ops
from ejkernel.ops import ConfigCache, ConfigKey, ConfigSelectorChain, Executor, Invocation, Kernel

# --- Kernel: the building block ---

BASIC_KERNEL = '''
from dataclasses import dataclass
from ejkernel.ops import Kernel
import jax.numpy as jnp

# 1. Define your configuration
@dataclass(frozen=True)
class MyConfig:
    block_size: int = 128
    num_warps: int = 4
    algorithm: str = "default"

# 2. Implement the kernel
class MyKernel(Kernel[MyConfig, jnp.ndarray]):
    def __init__(self):
        super().__init__(name="my_kernel")

    def run(self, a, b, *, cfg: MyConfig, **kwargs) -> jnp.ndarray:
        """Default implementation."""
        # Your operation logic here
        return jnp.dot(a, b)

    def heuristic_cfg(self, inv: "Invocation") -> MyConfig:
        """Generate config based on input shapes."""
        # inv.args contains the input arrays
        a = inv.args[0]
        block = 128 if a.shape[0] >= 128 else 64
        return MyConfig(block_size=block)
'''


def test_basic_kernel_runs(page):
    np.testing.assert_array_equal(A @ B, page(BASIC_KERNEL).MyKernel()(A, B))


@pytest.mark.parametrize(("rows", "block"), [(8, 64), (128, 128)])
def test_basic_kernel_is_configured_by_its_input_shapes(page, executor, rows, block):
    module = page(BASIC_KERNEL)
    config = executor.choose_config(module.MyKernel(), np.ones((rows, 16), np.float32), B)
    assert module.MyConfig(block_size=block) == config


def test_basic_kernel_is_named_by_its_constructor(page):
    assert page(BASIC_KERNEL).MyKernel().op_id == "my_kernel"


PLATFORMS = '''
class AttentionKernel(Kernel[AttentionConfig, jnp.ndarray]):
    def run_triton(self, q, k, v, *, cfg, **kwargs):
        """Triton GPU implementation."""
        return triton_flash_attention(q, k, v, **cfg.triton_params)

    def run_pallas(self, q, k, v, *, cfg, **kwargs):
        """Pallas TPU implementation."""
        return pallas_attention(q, k, v, **cfg.pallas_params)

    def run_xla(self, q, k, v, *, cfg, **kwargs):
        """XLA fallback implementation."""
        return xla_attention(q, k, v)

    def run(self, q, k, v, *, cfg, **kwargs):
        """Default fallback."""
        return self.run_xla(q, k, v, cfg=cfg, **kwargs)
'''


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    scale: float = 1.0

    @property
    def triton_params(self):
        return {"scale": self.scale}

    @property
    def pallas_params(self):
        return {"scale": self.scale}


@pytest.fixture
def attention_kernel(page):
    module = page(
        PLATFORMS,
        Kernel=Kernel,
        AttentionConfig=AttentionConfig,
        jnp=jnp,
        triton_flash_attention=lambda q, k, v, scale: jnp.sin(q) * scale,
        pallas_attention=lambda q, k, v, scale: jnp.cos(q) * scale,
        xla_attention=lambda q, k, v: jnp.tanh(q),
    )
    return module.AttentionKernel()


@pytest.mark.parametrize(("platform", "operation"), [("cuda", "sine"), ("tpu", "cosine"), ("cpu", "tanh")])
def test_the_platform_method_is_the_lowered_platform_s(attention_kernel, executor, platform, operation):
    run = jax.jit(lambda q: executor(attention_kernel, q, q, q, cfg=AttentionConfig()))
    text = run.trace(X).lower(lowering_platforms=(platform,)).as_text()
    assert [operation] == [name for name in ("sine", "cosine", "tanh") if f"stablehlo.{name} " in text]


def test_custom_gradients_are_used(page):
    module = page(
        """
        class MyKernel(Kernel[MyConfig, jnp.ndarray]):
            def run(self, a, b, *, cfg, **kwargs):
                return custom_forward(a, b, cfg)

            def custom_vjp(self, primals, cfg, kwargs, cotangents):
                \"\"\"Custom backward pass.\"\"\"
                a, b = primals
                ct = cotangents[0]
                grad_a = custom_grad_a(a, b, ct, cfg)
                grad_b = custom_grad_b(a, b, ct, cfg)
                return (grad_a, grad_b)
        """,
        Kernel=Kernel,
        MyConfig=MyConfig,
        jnp=jnp,
        custom_forward=lambda a, b, cfg: a * b,
        custom_grad_a=lambda a, b, ct, cfg: 10 * b * ct,
        custom_grad_b=lambda a, b, ct, cfg: 100 * a * ct,
    )
    kernel = module.MyKernel()
    gradients = jax.grad(lambda a, b: kernel(a, b, cfg=MyConfig()).sum(), argnums=(0, 1))(X, X + 1)
    np.testing.assert_array_equal(gradients, (10 * (X + 1), 100 * X))


def test_an_invocation_captures_a_call(page):
    inv = page(
        """
        from ejkernel.ops import Invocation

        # Created automatically by the executor
        inv = Invocation(
            kernel=my_kernel,
            args=(a, b),  # Positional arguments
            kwargs={'scale': 1.0},  # Keyword arguments
            metadata={...}  # Shapes, dtypes, device info
        )

        # Access abstracted shapes (for config lookup)
        inv.abstract_args  # JAX ShapeDtypeStruct versions
        inv.device_fingerprint  # Unique device identifier
        """,
        my_kernel=MATMUL,
        a=A,
        b=B,
    ).inv
    expected = (jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 4), jnp.float32))
    assert (expected, ops.device_fingerprint()) == (inv.abstract_args, inv.device_fingerprint)


# --- Executor: running kernels ---


def test_an_execution_stack_is_created_and_runs_kernels(page):
    module = page(
        """
        from ejkernel.ops import Executor, ConfigSelectorChain, ConfigCache

        # Create the execution stack
        cache = ConfigCache()
        selector = ConfigSelectorChain(cache=cache)
        executor = Executor(selector)

        # Run a kernel
        result = executor(my_kernel, a, b)

        # Run with explicit config
        again = executor(my_kernel, a, b, cfg=my_config)
        """,
        my_kernel=MATMUL,
        my_config=MyConfig(block_size=64),
        a=A,
        b=B,
    )
    np.testing.assert_array_equal([A @ B, A @ B], [module.result, module.again])


def test_executor_page_runs_and_compiles_a_kernel(page):
    module = page(
        """
        cache = ConfigCache()
        selector = ConfigSelectorChain(cache)
        executor = Executor(selector)

        result = executor(my_kernel, input_data)

        compiled_fn = executor.compile(my_kernel, example_input)
        compiled_result = compiled_fn(actual_input)
        """,
        ConfigCache=ConfigCache,
        ConfigSelectorChain=ConfigSelectorChain,
        Executor=Executor,
        my_kernel=DOUBLE,
        input_data=X,
        example_input=X,
        actual_input=X + 1,
    )
    np.testing.assert_array_equal([2 * X, 2 * (X + 1)], [module.result, module.compiled_result])


def test_a_compiled_matmul_runs_on_actual_arguments(page, executor):
    module = page(
        """
        compiled_matmul = executor.compile(matmul_kernel, x_example, y_example)

        result = compiled_matmul(x_actual, y_actual)
        """,
        executor=executor,
        matmul_kernel=MATMUL,
        x_example=A,
        y_example=B,
        x_actual=2 * A,
        y_actual=B,
    )
    np.testing.assert_array_equal(2 * A @ B, module.result)


def test_choose_config_selects_without_executing(executor):
    assert MyConfig() == executor.choose_config(MATMUL, jax.ShapeDtypeStruct((8, 16), "float32"), B)


def test_choose_config_takes_an_override(executor):
    assert MyConfig(block_size=1) == executor.choose_config(MATMUL, A, B, cfg=MyConfig(block_size=1))


def test_an_executor_has_a_chooser_and_a_stamp_prefix(chain):
    executor = Executor(chain)
    assert (chain, "ejkernel_ops") == (executor.chooser, executor.stamp_prefix)


def test_a_chooser_needs_nothing_but_choose(page):
    module = page(
        """
        from ejkernel.ops.execution.executor import ConfigChooser, Executor

        class Always(ConfigChooser):
            def choose(self, inv, kernel):
                return my_config

        config = Executor(Always(), stamp_prefix="mine").choose_config(my_kernel, a, b)
        """,
        my_kernel=MATMUL,
        my_config=MyConfig(block_size=3),
        a=A,
        b=B,
    )
    assert MyConfig(block_size=3) == module.config


# --- Configuration selection and caching ---


def test_config_cache_stores_and_retrieves(page):
    module = page(
        """
        from ejkernel.ops import ConfigCache

        cache = ConfigCache()

        # Store a config
        cache.put(key, config)

        # Retrieve
        config = cache.get(key)  # Returns None if not found

        # Check existence
        if key in cache:
            ...
        """,
        key=("any", "hashable", 1),
        config=MyConfig(),
    )
    assert (MyConfig(), None, True) == (module.config, module.cache.get("other"), module.key in module.cache)


def test_persistent_cache_survives_across_sessions(page, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    module = page(
        """
        from ejkernel.ops import PersistentCache

        # Stored in ~/.cache/ejkernel/ by default
        persistent = PersistentCache(path="~/.cache/ejkernel/configs")

        # Same interface as ConfigCache
        persistent.put(key, config)
        config = persistent.get(key)
        """,
        key=ConfigKey("cpu:some", "matmul@v1", "0123456789abcdef"),
        config=MyConfig(num_warps=2),
    )
    another_session = ops.PersistentCache(path=tmp_path / ".cache" / "ejkernel" / "configs")
    assert [MyConfig(num_warps=2)] * 2 == [module.config, another_session.get(module.key)]


def test_persistent_cache_is_kept_in_the_home_folder_by_default(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("EJKERNEL_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert tmp_path / ".cache" / "ejkernel" / "configs" == ops.PersistentCache().path


def test_a_chain_combines_selection_strategies(page):
    selector = page(
        """
        from ejkernel.ops import ConfigSelectorChain, ConfigCache, PersistentCache

        selector = ConfigSelectorChain(
            cache=ConfigCache(),  # Level 1: In-memory
            persistent=PersistentCache(),  # Level 2: Disk
            autotune=True  # Level 3: Benchmark if not found
        )
        """
    ).selector
    tiers = ["override", "overlay", "memory", "persistent", "shipped", "autotune", "sister", "heuristic"]
    inv = Invocation(kernel=MATMUL, args=(A, B))
    assert (tiers, True) == ([c.tier for c in selector.consult(inv, MATMUL)], selector.policy.autotune)


def test_an_overlay_is_used_temporarily(page, executor):
    inv = Invocation(kernel=DOUBLE, args=(X,))
    my_custom_cache = ConfigCache()
    my_custom_cache.put(inv.key, MyConfig(block_size=7))
    module = page(
        """
        from ejkernel.ops import overlay_cache, policy_override

        # Temporarily use different cache
        with overlay_cache(my_custom_cache):
            result = executor(kernel, args)
            inside = executor.choose_config(kernel, args)

        outside = executor.choose_config(kernel, args)
        """,
        executor=executor,
        kernel=DOUBLE,
        args=X,
        my_custom_cache=my_custom_cache,
    )
    assert (MyConfig(block_size=7), MyConfig()) == (module.inside, module.outside)


def test_a_policy_is_overridden_temporarily(page):
    class NoTuner:
        def tune(self, *args, **kwargs):
            raise AssertionError("tuned although autotune=False")

    module = page(
        """
        # Temporarily change autotuning policy
        with policy_override(autotune=False):
            result = executor(kernel, args)  # No autotuning
        """,
        policy_override=ops.policy_override,
        executor=Executor(ConfigSelectorChain(autotune=True, tuner=NoTuner())),
        kernel=DOUBLE,
        args=X,
    )
    np.testing.assert_array_equal(2 * X, module.result)


# --- Autotuning ---

CONFIG_SPACE = '''
class MyKernel(Kernel[MyConfig, jnp.ndarray]):
    def config_space(self, inv: Invocation) -> list[MyConfig]:
        """Return configs to try during autotuning."""
        return [
            MyConfig(block_size=64, num_warps=2),
            MyConfig(block_size=128, num_warps=4),
            MyConfig(block_size=256, num_warps=8),
        ]
'''


@pytest.fixture
def kernel(page):
    """The kernel that declares a config space, made runnable."""
    names = {"Kernel": Kernel, "MyConfig": MyConfig, "Invocation": Invocation, "jnp": jnp}
    declared = page(CONFIG_SPACE, **names).MyKernel
    return type("MyKernel", (declared,), {"run": lambda self, a, b, *, cfg: jnp.dot(a, b)})()


def test_a_config_space_alone_gives_the_heuristic_its_first_candidate(kernel, executor):
    assert MyConfig(block_size=64, num_warps=2) == executor.choose_config(kernel, A, B)


def test_manual_autotuning_returns_the_best_config_and_benchmark_milliseconds(page, kernel):
    module = page(
        """
        from ejkernel.ops import autotune, benchmark

        # Autotune a specific kernel call
        best_config = autotune(
            kernel, a, b,
            configs=kernel.config_space(inv),
            num_warmup=3,
            num_iters=10
        )

        # Simple function benchmarking
        time_ms = benchmark(lambda: kernel(a, b), num_iters=100)
        """,
        kernel=kernel,
        inv=Invocation(kernel=kernel, args=(A, B)),
        a=A,
        b=B,
    )
    assert module.best_config in kernel.config_space(module.inv)
    assert 0 < module.time_ms < 1000


def test_recorded_invocations_are_tuned_at_once(page, kernel):
    inv = Invocation(kernel=kernel, args=(A, B))
    module = page(
        """
        from ejkernel.ops import autotune_recorded, record_invocation, get_invocations

        # Enable recording
        record_invocation(kernel, inv)

        # ... run your model with various inputs ...

        # Get all recorded invocations
        invocations = get_invocations()

        # Autotune all at once
        results = autotune_recorded(invocations)
        """,
        kernel=kernel,
        inv=inv,
    )
    assert {inv.device_fingerprint: {"MyKernel@v0": {inv.call_key: (kernel, inv.abstract_args, {})}}} == (
        module.invocations
    )
    assert [("MyKernel@v0", inv.call_key)] == [(e.op_id_v, e.call_key) for e in module.results.entries]
