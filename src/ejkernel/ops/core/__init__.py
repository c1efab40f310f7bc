# SPDX-License-Identifier: Apache-2.0
"""Kernels, calls, and calls under JAX's transformations."""
