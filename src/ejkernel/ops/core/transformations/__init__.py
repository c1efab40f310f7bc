# SPDX-License-Identifier: Apache-2.0
"""Calls under JAX's transformations."""
