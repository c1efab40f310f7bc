# SPDX-License-Identifier: Apache-2.0
"""What the library costs, beside plain JAX: `python -m benchmarks`. See `benchmarks/results` for runs."""
