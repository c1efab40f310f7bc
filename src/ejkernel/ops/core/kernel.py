# SPDX-License-Identifier: Apache-2.0
"""Entry point of this package for other packages: `Kernel`, `Invocation`, and queries about a kernel."""

from __future__ import annotations

from ejkernel.ops.core.callspec import prepared as prepared
from ejkernel.ops.core.callspec import with_python_numbers as with_python_numbers
from ejkernel.ops.core.declared_names import same_code as same_code
from ejkernel.ops.core.hooks import Kernel as Kernel
from ejkernel.ops.core.hooks import candidates_of as candidates_of
from ejkernel.ops.core.hooks import check_config as check_config
from ejkernel.ops.core.hooks import config_type_of as config_type_of
from ejkernel.ops.core.hooks import has_backward_heuristic as has_backward_heuristic
from ejkernel.ops.core.hooks import has_gradient_rule as has_gradient_rule
from ejkernel.ops.core.hooks import hook as hook
from ejkernel.ops.core.hooks import living_kernels as living_kernels
from ejkernel.ops.core.hooks import overrides as overrides
from ejkernel.ops.core.hooks import run_forms as run_forms
from ejkernel.ops.core.hooks import unbound as unbound
from ejkernel.ops.core.invocation import Invocation as Invocation
