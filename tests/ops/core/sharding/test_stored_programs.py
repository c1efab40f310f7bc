# SPDX-License-Identifier: Apache-2.0
"""JAX's persistent compilation cache and calls that split themselves: never another configuration than is found."""

import json
import os
import subprocess
import sys

import pytest
from tests import forked

pytestmark = pytest.mark.slow

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from ejkernel.ops import Kernel, ShardingRule, autotune, overlay_cache, default_executor
from jax._src import monitoring

jax.config.update("jax_num_cpu_devices", 4)
stored, what, cache = sys.argv[1:]
jax.config.update("jax_compilation_cache_dir", stored)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", "pointers" not in what)


class Scaled(Kernel[int, jax.Array]):
    def heuristic_cfg(self, inv):
        return 1

    def config_space(self, inv):
        return [1, 2]

    def sharding_rule(self, inv):
        return ShardingRule("m n -> m n", split="m")

    def run(self, x, *, cfg):  # the configuration shows in the result, as it never should
        return x * cfg + (7 if "edited" in what else 0)


kernel, hits = Scaled("scaled"), []
monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None)
mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("rows")))
if "tuned" in what:
    part = default_executor().explain(kernel, x[:2]).key
    default_executor().chooser.remember(part, 2)
hits.clear()
out = jax.jit(lambda x: kernel(x))(x)
hit = bool(hits)  # of this program, and not of those that read its result
print(json.dumps({"value": float(out[0, 0]), "hit": hit}))
"""


@pytest.fixture
def run(tmp_path):
    environment = os.environ | {
        "EJKERNEL_CACHE_DIR": str(tmp_path / "configurations"),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path))),
    }
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(what="-"):
        command = [str(tmp_path / "program.py"), str(tmp_path / "programs"), what, "-"]
        if what in ("edited", "tuned"):
            done = forked.python(tmp_path, *command, EJKERNEL_CACHE_DIR=environment["EJKERNEL_CACHE_DIR"])
        else:  # in a fork, pointers would be the same as in another fork
            done = subprocess.run(
                [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
            )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_stored_program_comes_back_while_nothing_changed_and_never_with_another_configuration(run):
    assert run() == {"value": 1.0, "hit": False}
    assert run() == {"value": 1.0, "hit": True}
    assert run("edited") == {"value": 8.0, "hit": False}
    assert run("tuned") == {"value": 2.0, "hit": False}
    assert run() == {"value": 2.0, "hit": True}


def test_without_the_setting_every_program_is_compiled_again(run):
    for _ in range(2):
        assert run("pointers") == {"value": 1.0, "hit": False}
