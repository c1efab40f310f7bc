# SPDX-License-Identifier: Apache-2.0
"""Warnings name the line of the user's program, not one of ejkernel or JAX."""

from __future__ import annotations

import inspect
import threading
import warnings

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import CacheWarning, ConfigKey, Kernel, OfflineWarning, PersistentCache, UnstableKeyWarning, autotune
from ejkernel.ops.utils.messages.warn import warn

X = jnp.ones(4)


class Applied(Kernel[int, object]):
    def run(self, x, function, *, cfg):
        return function(x) * cfg

    def heuristic_cfg(self, inv):
        return 1


def line_here():
    return inspect.currentframe().f_back.f_lineno


def one(caught):
    (warning,) = [w for w in caught if w.category is not DeprecationWarning]
    return warning.filename, warning.lineno


@pytest.mark.parametrize("wrapped", [lambda f: f, jax.jit, jax.grad], ids=["eager", "jit", "grad"])
def test_a_warning_of_a_call_points_at_the_line_that_runs_the_program(wrapped):
    kernel = Applied()
    step = wrapped(lambda x: kernel(x, lambda y: y).sum())
    with pytest.warns(UnstableKeyWarning) as caught:
        step(X), (line := line_here())
    defined = line - 2  # eager calls, and those under `grad`, run where the function says so
    assert {(w.filename, w.lineno) for w in caught} <= {(__file__, line), (__file__, defined)}


def test_a_warning_of_tuning_points_at_the_call():
    with pytest.warns(OfflineWarning, match="made no call of an operation") as caught:
        autotune(jnp.sin, X), (line := line_here())
    assert one(caught) == (__file__, line)


def test_a_warning_of_a_file_points_at_the_line_that_reads_it(tmp_path):
    cache, key = PersistentCache(tmp_path), ConfigKey("cpu:x", "op@v0", "0" * 16)
    cache.put(key, {"rows": 1})
    (file,) = tmp_path.rglob("*.json")
    file.write_text("damaged")
    with pytest.warns(CacheWarning, match="ignoring cache entry .* edited or cut off.*prune --unreadable") as caught:
        cache.get(key), (line := line_here())
    assert one(caught) == (__file__, line)


def test_a_warning_of_code_without_a_file_needs_no_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.warns(UserWarning, match="of a text") as caught:
        exec(compile("warn('of a text', UserWarning)", "<of a text>", "exec"), {"warn": warn})
    assert one(caught) == ("<of a text>", 1)


def test_a_warning_is_shown_once_a_line_as_pythons_are():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            warn("twice", UserWarning)
    assert len(caught) == 1


def test_a_thread_of_nothing_but_library_code_warns_all_the_same():
    thread = threading.Thread(target=warn, args=("alone", UserWarning))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread.start()
        thread.join()
    assert [str(w.message) for w in caught] == ["alone"]
