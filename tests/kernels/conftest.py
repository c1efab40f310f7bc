# SPDX-License-Identifier: Apache-2.0
"""JAX's simulation of kernels for GPUs, without the work that it repeats."""

from __future__ import annotations

import functools
import threading
import weakref

import jax
import numpy as np
import pytest

from ejkernel import compat

_compiled = weakref.WeakKeyDictionary()  # by the program of a thread
_lock = threading.Lock()


@pytest.fixture(scope="session", autouse=True)
def quick_simulation():
    """Compile a thread's program once, and call back with the arrays of NumPy that there are.

    JAX compiles it for each thread of each launch, and copies each array to a device before it reads it.
    """
    if compat.kernels.mosaic_gpu_reason():
        yield
        return
    from jax._src import callback
    from jax._src.pallas.mosaic.interpret import thread_map
    from jax._src.pallas.mosaic_gpu.interpret import shared_memory

    to_int = shared_memory._to_int
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thread_map, "_run_jaxpr", run_compiled)
        patch.setattr(callback, "io_callback_impl", with_numpy(callback.io_callback_impl))
        patch.setattr(shared_memory, "_to_int", lambda x: to_int(x.item() if isinstance(x, np.ndarray) else x))
        yield


@pytest.fixture(autouse=True)
def no_races(monkeypatch):
    """Fail a test if the race detector found a race in any of its launches; JAX keeps the races of the last one."""
    if compat.kernels.mosaic_gpu_reason():
        yield
        return
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    launches = []

    def detector(**options):
        launches.append(make(**options))
        return launches[-1]

    make = gpu_callbacks.GPURaceDetectionState
    monkeypatch.setattr(gpu_callbacks, "GPURaceDetectionState", detector)
    yield
    assert not any(launch.races_found for launch in launches)


def run_compiled(jaxpr, consts, *args):
    """Run a thread's program."""
    with _lock:
        if jaxpr not in _compiled:
            run = jax.jit(lambda consts, *args: jax.core.eval_jaxpr(jaxpr, consts, *args))
            _compiled[jaxpr] = run.lower(consts, *args).compile()
    _compiled[jaxpr](consts, *args)


def with_numpy(call_back):
    """Return JAX's `call_back` for arguments that stay arrays of NumPy.

    They are copied, since their memory is lent for the call.
    """

    def run(*args, callback, **options):
        return call_back(callback=functools.partial(callback, *map(np.array, args)), **options)

    return run
