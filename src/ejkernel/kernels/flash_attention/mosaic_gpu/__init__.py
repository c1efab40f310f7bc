# SPDX-License-Identifier: Apache-2.0
"""Attention on Hopper GPUs: our kernels in Pallas Mosaic GPU."""
