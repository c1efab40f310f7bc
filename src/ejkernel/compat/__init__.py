# SPDX-License-Identifier: Apache-2.0
"""Every JAX call that differs between versions or is not public, by subject."""

from __future__ import annotations

from ejkernel.compat import alternatives as alternatives
from ejkernel.compat import executables as executables
from ejkernel.compat import kernels as kernels
from ejkernel.compat import launches as launches
from ejkernel.compat import partitioning as partitioning
from ejkernel.compat import processes as processes
from ejkernel.compat import products as products
from ejkernel.compat import programs as programs
from ejkernel.compat import propagation as propagation
from ejkernel.compat import settings as settings
from ejkernel.compat import splash as splash
from ejkernel.compat import tracing as tracing
