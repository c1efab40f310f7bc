# SPDX-License-Identifier: Apache-2.0
"""Programs that Google's compiler cannot simulate with its usual placement of arrays."""

import jax
import pytest

from ejkernel.ops.autotuner.compile.simulation import compiled_and_simulated

FULL = "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Program vmem requirement: HLO temp 44.71M"


class Lowered:
    """A lowered program that raises the first errors in `compile`."""

    def __init__(self, folder, *errors):
        self.folder, self.errors, self.options = folder, list(errors), []

    def compile(self, compiler_options):
        assert not list(self.folder.iterdir())
        self.options.append(compiler_options)
        (self.folder / "estimate").touch()
        if self.errors:
            raise jax.errors.JaxRuntimeError(self.errors.pop(0))
        return "compiled"


def test_arrays_of_xla_are_kept_out_of_vector_memory_if_they_do_not_fit_beside_a_kernel(tmp_path):
    lowered = Lowered(tmp_path, FULL)
    assert compiled_and_simulated(lowered, tmp_path, limit="1") == "compiled"
    assert lowered.options == [{"limit": "1"}, {"limit": "1", "xla_vf_vmem_memory_space_assignment": "false"}]


@pytest.mark.parametrize("errors", [("INTERNAL: no",), (FULL, FULL)], ids=["another error", "twice"])
def test_other_errors_are_raised(tmp_path, errors):
    lowered = Lowered(tmp_path, *errors)
    with pytest.raises(jax.errors.JaxRuntimeError):
        compiled_and_simulated(lowered, tmp_path)
    assert len(lowered.options) == len(errors)
