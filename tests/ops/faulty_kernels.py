# SPDX-License-Identifier: Apache-2.0
"""A kernel with candidates that fail in every way; worker processes import it from here."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops import Kernel

SHAPE = (32, 32)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A configuration: its fault, the work before it, and the compiler's message."""

    kind: str = ""
    repeats: int = 0
    says: str = ""


def spill(count):
    """Return the report of the GPU's assembler about a kernel."""
    stores = f"{count} bytes spill stores, {count} bytes spill loads"
    return f"ptxas info    : Function properties for kernel\n    {count} bytes stack frame, {stores}\n"


HEURISTIC = Fault(repeats=400)  # so slow that no load of the machine hides it
BEST = Fault(repeats=1)


class UnspeakableError(Exception):
    def __str__(self):
        raise ValueError("no words")

    __repr__ = __str__


RAISED = {
    "raise": ValueError("it raises"),
    "interrupt": KeyboardInterrupt(),
    "quit": SystemExit(3),
    "unspeakable": UnspeakableError(),
}


def close_streams():
    sys.stdout.close()
    sys.stderr.close()


def replace_streams():
    sys.stdout = sys.stderr = object()


CLOSING = {
    "close": lambda: os.closerange(1, 3),
    "close streams": close_streams,
    "replace streams": replace_streams,
    "close all": lambda: os.closerange(0, 4096),
}


def keep_the_lock():
    """Never return, and never let another thread of this process run Python."""
    ctypes.PyDLL(None).pause()


def _strike(kind):
    """Return a callback that harms its process from the host's side."""

    def callback(x):
        if kind == "abort":
            os.abort()
        if kind == "exit":
            os._exit(3)
        if kind == "never":
            threading.Event().wait()
        if kind == "lock":
            keep_the_lock()
        if kind == "memory":
            np.ones(2**62, np.uint8)  # more than any machine can promise, however much it promises
        return x

    return callback


class Faulty(Kernel[Fault, jax.Array]):
    """`x`, by way of `repeats` products; of its candidates the heuristic is right and slow, `BEST` right and fast."""

    kinds: tuple[str, ...] = ()

    def run(self, x, *, cfg):
        if cfg.kind in RAISED:
            raise RAISED[cfg.kind]
        os.write(1, cfg.says.encode())
        sys.stderr.write("")  # raises if stderr is closed
        if cfg.kind in CLOSING:
            CLOSING[cfg.kind]()
        if cfg.kind == "abort while tracing":
            os.abort()
        if cfg.kind == "never while tracing":
            threading.Event().wait()
        if cfg.kind == "lock while tracing":
            keep_the_lock()
        x = jax.lax.fori_loop(0, cfg.repeats, lambda _, x: x + 1e-30 * jnp.sin(x @ x), x)
        if cfg.kind in ("abort", "exit", "never", "lock", "memory"):
            return jax.pure_callback(_strike(cfg.kind), jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        if cfg.kind == "nan":
            return x * jnp.nan
        if cfg.kind == "wrong":
            return x * 1.01
        if cfg.kind == "terabyte":
            return x + jnp.sort(x[0, 0] * jnp.arange(2.0**19)[:, None] * jnp.arange(2.0**19), 1)[: SHAPE[0], : SHAPE[1]]
        return x

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        factor = 2.0 if cfg.kind == "wrong gradient" else 1.0
        return (factor * cotangents[0],)

    def reference(self, x):
        return x

    def heuristic_cfg(self, inv):
        return HEURISTIC

    def config_space(self, inv):
        return [*(Fault(kind) for kind in self.kinds), BEST]


class Crashing(Faulty):
    kinds = ("abort", "exit", "abort while tracing")


class Hanging(Faulty):
    kinds = ("never",)


class Locking(Faulty):
    kinds = ("lock", "lock while tracing")


class Closing(Faulty):
    kinds = tuple(CLOSING)


class Raising(Faulty):
    kinds = tuple(RAISED)


class Failing(Faulty):
    kinds = ("raise", "nan", "wrong", "memory", "terabyte", "wrong gradient")


class FailingOnDevice(Faulty):
    kinds = ("raise", "nan", "wrong", "terabyte", "wrong gradient")


class Spilling(Faulty):
    def heuristic_cfg(self, inv):
        return Fault(repeats=400, says=spill(800))


class Unsendable(Faulty):
    """Its candidate cannot be pickled."""

    def config_space(self, inv):
        @dataclasses.dataclass(frozen=True)
        class Local(Fault):
            pass

        return [Local(repeats=1)]


class BrokenReference(Faulty):
    def reference(self, x):
        os.abort()


plain, spilling = Faulty("plain"), Spilling("spilling")
crashing, hanging, failing = Crashing("crashing"), Hanging("hanging"), Failing("failing")
locking, closing, raising = Locking("locking"), Closing("closing"), Raising("raising")
failing_on_device = FailingOnDevice("failing_on_device")
broken_reference = BrokenReference("broken_reference")
unsendable = Unsendable("unsendable")
