# SPDX-License-Identifier: Apache-2.0
"""Tests of the promises about files, processes and threads under hostile conditions: `python -m benchmarks.torture`."""
