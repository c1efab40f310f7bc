# SPDX-License-Identifier: Apache-2.0
"""The `ejkernel` command."""

from ejkernel.cli.app import main as main
