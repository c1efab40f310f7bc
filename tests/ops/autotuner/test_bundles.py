# SPDX-License-Identifier: Apache-2.0
"""Bundles: writing, reading, and measuring their programs without compiling."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.ops import faulty_kernels
from tests.ops.autotuner.made_up_times import interleaved_with
from tests.ops.sample_kernels import told_apart
from tests.ops.sealing import change_object

from ejkernel import compat
from ejkernel.ops.autotuner.bench import timing
from ejkernel.ops.autotuner.compile.bundles import compile_bundle, read_bundle
from ejkernel.ops.autotuner.compile.targets import Target
from ejkernel.ops.autotuner.trials.candidates import CodeFile
from ejkernel.ops.autotuner.trials.status import Status
from ejkernel.ops.autotuner.tuner import Autotuner
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.core import declared_names
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.errors import CandidateError, ConfigError, TuningWarning
from ejkernel.ops.utils.storage.serialize import digest_of

pytestmark = pytest.mark.slow

X = jax.ShapeDtypeStruct((8,), jnp.int32)  # no gradient, which would be compiled where it is checked
HERE = Target.named("here")


class Twice(Kernel[int, jax.Array]):
    """`2 * x`; 3 and 30 are one program, 4 is wrong, 5 calls back, and negative ones fail."""

    space = (1, 2, 3, 30, 4, 5, -1)

    def __init__(self):
        super().__init__("twice")
        self.traced = []

    def run(self, x, *, cfg):
        self.traced.append(cfg)
        if cfg < 0:
            raise ValueError("it raises")
        if cfg == 5:
            return jax.pure_callback(lambda x: 2 * x, X, x)
        return told_apart(x * 3 if cfg == 4 else x + x, min(cfg, 3))

    def reference(self, x):
        self.traced.append("reference")
        return x * 2

    def heuristic_cfg(self, inv):
        return 2

    def config_space(self, inv):
        return list(self.space)


@dataclasses.dataclass(frozen=True)
class Untold:
    """The configuration of `Untyped`, which no class and no annotation names."""

    rows: int = 1


class Untyped(Kernel):
    def run(self, x, *, cfg):
        return told_apart(x + x, cfg.rows)

    def heuristic_cfg(self, inv):
        return Untold()

    def config_space(self, inv):
        return [Untold(1), Untold(2)]


@pytest.fixture
def twice(monkeypatch):
    """A kernel with 3 as its fastest configuration."""
    monkeypatch.setattr(timing, "interleaved", interleaved_with(lambda cfg: 1.0 if cfg == 3 else 2.0 + cfg))
    return Twice()


def bundle(kernel, folder, *args, **options):
    inv = Invocation(kernel=kernel, args=args or (X,))
    (call,) = compile_bundle([inv], HERE, folder / "bundle", **options)
    return call


def tune(kernel, call, *args, isolate=False):
    inv = Invocation(kernel=kernel, args=args or (X,))
    return Autotuner().tune(inv, kernel, compiled=call, policy=AutotunePolicy(isolate=isolate))


def statuses(outcomes):
    return {outcome.config: outcome.status for outcome in outcomes}


def outcomes_of(call):
    return [compiled.outcome for compiled in call.candidates]


# --- making one ---


def test_the_heuristic_comes_first_and_every_candidate_has_a_status(twice, tmp_path):
    call = bundle(twice, tmp_path)
    assert list(statuses(outcomes_of(call)).items()) == [
        (2, "ready"),
        (1, "ready"),
        (3, "ready"),
        (30, "same"),
        (4, "ready"),
        (5, "left"),
        (-1, "failed"),
    ]
    reasons = {outcome.config: outcome.reason for outcome in outcomes_of(call)}
    assert reasons[30] == "the same program as 3"
    assert reasons[-1] == "ValueError: it raises"
    assert reasons[5].startswith("it calls back into the process")


def test_only_requested_candidates_are_compiled_beside_the_heuristic(twice, tmp_path):
    call = bundle(twice, tmp_path, candidates=lambda inv: [3, 4])
    assert call.configs == [2, 3, 4]


def test_each_program_is_a_file_and_so_is_the_reference(twice, tmp_path):
    call = bundle(twice, tmp_path)
    files = {program.code.path.name for _, program in call.programs} | {call.reference.code.path.name}
    assert len(files) == 5
    facts = {file.replace(".bin", ".facts.json") for file in files}
    assert files | facts | {"manifest.json"} == {file.name for file in (tmp_path / "bundle").iterdir()}
    x = np.arange(8, dtype=np.int32)
    assert call.reference.load()(x)[0].tolist() == (2 * x).tolist()
    assert twice.traced.count("reference") == 1


def test_machine_code_is_compressed(twice, tmp_path):
    for _, program in bundle(twice, tmp_path).programs:
        assert len(program.code.path.read_bytes()) < len(program.code.read()) / 2


def test_machine_code_that_is_not_compressed_is_an_error(tmp_path):
    (tmp_path / "0.bin").write_bytes(b"code")
    with pytest.raises(CandidateError, match=r"program 0\.bin cannot be used: Error -3"):
        CodeFile(tmp_path / "0.bin", digest_of(b"code")).read()


def test_a_reference_with_a_candidate_s_program_is_in_the_bundle(tmp_path):
    call = bundle(faulty_kernels.failing_on_device, tmp_path, jax.ShapeDtypeStruct((4, 4), jnp.float32))
    assert statuses(outcomes_of(call))[faulty_kernels.Fault("wrong gradient")] == "ready"  # the identity, as it is
    assert call.reference is not None


@pytest.mark.parametrize(("options", "loads"), [({}, True), ({"processes": 2}, False)])
def test_only_a_process_that_compiles_loads_the_compiler(monkeypatch, tmp_path, options, loads):
    asked = []
    monkeypatch.setattr(Target, "check", lambda self, *, loads_compiler: asked.append(loads_compiler))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="must be empty"):
        compile_bundle([], Target.named("here"), tmp_path, **options)
    assert asked == [loads]


def test_a_folder_with_something_in_it_is_an_error(twice, tmp_path):
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="folder must be empty"):
        bundle(twice, tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error(twice, tmp_path):
    (tmp_path / "bundle").write_text("a file")
    with pytest.raises(ConfigError, match=r"the bundle's folder .*bundle cannot be written"):
        bundle(twice, tmp_path)


def test_a_full_disk_is_an_error_and_the_next_attempt_goes_on(twice, tmp_path, monkeypatch):
    def full(file, data):
        file.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(ConfigError, match=r"the bundle's folder .*bundle cannot be written: .*No space left"):
            bundle(twice, tmp_path)
    call = bundle(twice, tmp_path)
    assert read_bundle(tmp_path / "bundle") == [call]


def test_the_heuristic_determines_an_undeclared_configuration_type_of_a_bundle(tmp_path):
    kernel = Untyped("untyped_in_a_bundle")
    call = bundle(kernel, tmp_path)
    declared_names._noted.clear()  # as on another machine
    assert read_bundle(tmp_path / "bundle") == [call]


def test_of_a_large_space_some_are_compiled_and_the_heuristic_is_among_them(tmp_path):
    class Spacious(Twice):
        def run(self, x, *, cfg):
            return told_apart(x + x, cfg["a"])

        def heuristic_cfg(self, inv):
            return {"a": 999}

        def config_space(self, inv):
            return ConfigSpace({"a": list(range(1000))})

    call = bundle(Spacious(), tmp_path, max_candidates=30)
    assert call.configs[0] == {"a": 999}
    assert len(call.configs) in (30, 31)


def test_a_call_without_candidates_is_a_warning_and_the_next_is_compiled(twice, tmp_path):
    class Empty(Kernel[int, jax.Array]):
        def run(self, x, *, cfg):
            return x

        def reference(self, x):
            return x

        def config_space(self, inv):
            return []

    calls = [Invocation(kernel=kernel, args=(X,)) for kernel in (Empty("empty"), twice)]
    with pytest.warns(TuningWarning, match="empty: nothing to compile"):
        bundled = compile_bundle(calls, HERE, tmp_path / "bundle")
    assert [call.description["op"] for call in bundled] == ["twice@v0"]
    assert len(read_bundle(tmp_path / "bundle")) == 1


def test_progress_counts_the_candidates_without_the_reference(twice, tmp_path):
    counts = []
    call = bundle(twice, tmp_path, progress=lambda inv, done, total: counts.append((inv.op_id, done, total)))
    assert len(call.candidates) == 7
    assert counts == [("twice", min(done, 7), 7) for done in range(1, 9)]


# --- reading one ---


def test_a_bundle_survives_a_round_trip(twice, tmp_path):
    call = bundle(twice, tmp_path)
    assert read_bundle(tmp_path / "bundle") == [call]


def edited(folder, change):
    change_object(folder / "bundle" / "manifest.json", change)
    return folder / "bundle"


def first_row(**fields):
    return lambda manifest: manifest["calls"][0]["candidates"][0].update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(schema=6, colour="red"), "written by a newer ejkernel: schema 6, not 5; compile it again"),
        (lambda m: m.update(schema=1), "written by an older ejkernel: schema 1, not 5; compile it again"),
        (lambda m: m.pop("calls"), "is not a usable bundle: .*calls"),
        (lambda m: m.update(colour="red"), "is not a usable bundle: .*colour"),
        (lambda m: m.update(target="gpu:abacus"), "was made for gpu:abacus with JAX .*; this is cpu:.* with JAX"),
        (lambda m: m.update(target="tpu:tpu_v6_lite"), "for tpu_v6e with .* Measure it there"),
        (lambda m: m.update(jax="0.1.2"), r"with JAX 0\.1\.2 and"),
        (lambda m: m.update(jaxlib="0.1.3"), r"and jaxlib 0\.1\.3; this is"),
        (first_row(program="../secret"), r"names a file outside of it: '\.\./secret'"),
        (first_row(program="/etc/passwd"), "names a file outside of it"),
        (first_row(program=".."), "names a file outside of it"),
        (first_row(program=""), "names a file outside of it"),
        (first_row(program="manifest"), "names a file outside of it"),
        (first_row(program=None), "has a candidate without its program"),
        (lambda m: m["calls"][0].update(description=None), "is not a usable bundle: .*description"),
    ],
)
def test_a_manifest_for_another_device_or_version_is_a_clear_error(twice, tmp_path, change, message):
    bundle(twice, tmp_path)
    with pytest.raises(ConfigError, match=message):
        read_bundle(edited(tmp_path, change))


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b'{"schema": 1}'])
def test_an_invalid_manifest_is_an_error(tmp_path, content):
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(ConfigError, match="is not a usable bundle"):
        read_bundle(tmp_path)


def test_a_changed_manifest_is_an_error(twice, tmp_path):
    bundle(twice, tmp_path)
    path = tmp_path / "bundle" / "manifest.json"
    path.write_text(path.read_text().replace('"ready"', '"left"', 1))
    with pytest.raises(ConfigError, match="its content was edited or cut off: the digest does not match"):
        read_bundle(tmp_path / "bundle")


def test_a_folder_without_a_manifest_is_no_bundle(tmp_path):
    with pytest.raises(ConfigError, match="is not a usable bundle"):
        read_bundle(tmp_path)
    with pytest.raises(ConfigError, match=r"there is no folder .*none; pass the folder of a bundle"):
        read_bundle(tmp_path / "none")


def test_an_unknown_configuration_type_names_the_module_to_import(tmp_path):
    call = bundle(faulty_kernels.failing_on_device, tmp_path, jax.ShapeDtypeStruct((4, 4), jnp.float32))

    assert call.configs[0] == faulty_kernels.HEURISTIC
    with pytest.raises(
        ConfigError, match=r"needs the module of 'my_kernels\.Tile'; import it first \(--import MODULE\)"
    ):
        read_bundle(edited(tmp_path, first_row(config_type="my_kernels.Tile")))


def test_a_configuration_that_does_not_fit_its_type_is_a_clear_error(tmp_path):
    bundle(faulty_kernels.failing_on_device, tmp_path, jax.ShapeDtypeStruct((4, 4), jnp.float32))
    with pytest.raises(ConfigError, match=r"has a configuration that does not fit its type: .*colour"):
        read_bundle(edited(tmp_path, first_row(config={"colour": "red"})))


def swap(one, other):
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def flip(one, _):
    raw = bytearray(one.read_bytes())
    raw[len(raw) // 2] ^= 1
    one.write_bytes(raw)


def to_pipe(one, _):
    one.unlink()
    os.mkfifo(one)


def to_link(one, _):
    one.symlink_to(one.rename(one.parent.parent / "the same program"))


# --- measuring one ---


@pytest.mark.parametrize("damage", [swap, flip, to_pipe, to_link, lambda one, _: one.unlink()])
def test_a_program_that_differs_from_its_row_is_compiled_here(twice, tmp_path, damage):
    programs = dict(bundle(twice, tmp_path).programs)
    damage(programs[4].code.path, programs[1].code.path)
    twice.traced.clear()
    with pytest.warns(TuningWarning, match=r"a candidate is compiled here: its program .*\.bin"):
        (call,) = read_bundle(tmp_path / "bundle")
    data = tune(twice, call)
    assert data.config == 3
    assert statuses(data.outcomes)[4] == "wrong"
    assert set(twice.traced) == ({4, 5, 1} if damage is swap else {4, 5})


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts["program"].update(inputs=10**12),
        lambda facts: facts["program"].update(outputs=-1),
        lambda facts: facts["program"].update(digest="0" * 64),
        lambda facts: facts["program"].update(code="x"),
        lambda facts: facts.update(schema=9),
    ],
)
def test_a_program_with_other_facts_is_compiled_here(twice, tmp_path, change):
    programs = dict(bundle(twice, tmp_path).programs)
    change_object(programs[4].code.path.with_suffix(".facts.json"), change)
    with pytest.warns(TuningWarning, match=r"a candidate is compiled here: its program .*\.facts\.json"):
        (call,) = read_bundle(tmp_path / "bundle")
    assert [config for config, _ in call.programs] == [config for config in programs if config != 4]


def test_a_damaged_reference_is_compiled_here(twice, tmp_path):
    flip(bundle(twice, tmp_path).reference.code.path, None)
    twice.traced.clear()
    with pytest.warns(TuningWarning, match="was changed after it was written"):
        (call,) = read_bundle(tmp_path / "bundle")
    assert tune(twice, call).config == 3
    assert "reference" in twice.traced


def test_only_left_candidates_are_traced_and_compiled_again(twice, tmp_path):
    bundle(twice, tmp_path)
    twice.traced.clear()
    (call,) = read_bundle(tmp_path / "bundle")
    data = tune(twice, call)
    assert twice.traced == [5]
    assert data.config == 3
    assert statuses(data.outcomes) == {
        2: "measured", 1: "measured", 3: "measured", 30: "same", 4: "wrong", 5: "measured", -1: "failed",
    }  # fmt: skip
    assert {outcome.config: outcome.reason for outcome in data.outcomes}[-1] == "ValueError: it raises"


@pytest.mark.parametrize("isolate", [False, True], ids=["in this process", "in a worker"])
def test_failures_in_the_bundle_are_not_retried(tmp_path, isolate):
    kernel, x = faulty_kernels.failing_on_device, jax.ShapeDtypeStruct((4, 4), jnp.float32)
    call = bundle(kernel, tmp_path, x)
    best = next(c for c in call.candidates if c.outcome.config == faulty_kernels.BEST)
    failed = dataclasses.replace(best.outcome, status=Status.FAILED, reason="it failed there")
    others = (c for c in call.candidates if c is not best)
    call = dataclasses.replace(call, candidates=(*others, dataclasses.replace(best, outcome=failed, program=None)))
    with pytest.warns(TuningWarning, match="all 6 candidates beside the heuristic were rejected"):
        data = tune(kernel, call, x, isolate=isolate)
    found = {outcome.config: (outcome.status, outcome.reason) for outcome in data.outcomes}
    assert found[faulty_kernels.BEST] == ("failed", "it failed there")


def test_a_damaged_program_file_is_a_failed_candidate(twice, tmp_path):
    call = bundle(twice, tmp_path)
    programs = dict(call.programs)
    programs[3].code.path.unlink()
    programs[1].code.path.write_bytes(b"no machine code")
    data = tune(twice, call)
    assert data.config == 2
    assert {config: status for config, status in statuses(data.outcomes).items() if config in (1, 3)} == {
        1: "failed",
        3: "failed",
    }


# --- for a TPU ---


def test_programs_of_another_libtpu_are_compiled_here_with_one_warning(twice, tmp_path, monkeypatch):
    bundle(twice, tmp_path)
    change_object(tmp_path / "bundle" / "manifest.json", lambda data: data.update(libtpu="0.0.1"))
    with pytest.warns(TuningWarning, match=r"compiled here: libtpu 0.0.1 compiled them; here is") as warned:
        (call,) = read_bundle(tmp_path / "bundle")
    assert len(warned) == 1
    assert (call.programs, call.reference) == ((), None)
    assert statuses(outcomes_of(call))[3] == "left"
    assert tune(twice, call).config == 3


def test_a_program_that_the_runtime_does_not_load_is_compiled_here(twice, tmp_path, monkeypatch):
    call = bundle(twice, tmp_path)

    def refuse(payload, **_):
        raise RuntimeError("serialized by another compiler")

    monkeypatch.setattr(compat.executables, "loaded", refuse)
    twice.traced.clear()
    with pytest.warns(TuningWarning, match=r"cannot be loaded, so it is compiled here: .*another compiler"):
        found = tune(twice, call)
    assert found.config == 3
    assert "reference" in twice.traced
