# SPDX-License-Identifier: Apache-2.0
"""Attention on Hopper GPUs by kernels of our own, in Pallas Mosaic GPU."""
