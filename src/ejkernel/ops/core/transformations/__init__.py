# SPDX-License-Identifier: Apache-2.0
"""What JAX's transformations make of a call."""
