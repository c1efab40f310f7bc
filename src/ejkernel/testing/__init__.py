# SPDX-License-Identifier: Apache-2.0
"""Checks of kernels and implementations, for the tests of their authors."""

from ejkernel.testing.check_kernel import check_kernel as check_kernel
from ejkernel.testing.check_kernel import paired as paired
from ejkernel.testing.report import CheckReport as CheckReport
from ejkernel.testing.rows import CheckRow as CheckRow
from ejkernel.testing.rows import CheckStatus as CheckStatus
