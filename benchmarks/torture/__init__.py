# SPDX-License-Identifier: Apache-2.0
"""What is promised of files, processes and threads on hostile days, tried: `python -m benchmarks.torture`."""
