# SPDX-License-Identifier: Apache-2.0
"""The cost of the library beside plain JAX: `python -m benchmarks`. See `benchmarks/results` for runs."""
