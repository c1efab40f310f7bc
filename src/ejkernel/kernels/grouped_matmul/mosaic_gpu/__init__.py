# SPDX-License-Identifier: Apache-2.0
"""The implementation by our own kernels for Hopper GPUs."""
