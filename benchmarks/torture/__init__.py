# SPDX-License-Identifier: Apache-2.0
"""What the library promises of days that are hostile, as a program that tries to break it: `python -m benchmarks.torture`."""
