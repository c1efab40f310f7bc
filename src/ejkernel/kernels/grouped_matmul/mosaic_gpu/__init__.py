# SPDX-License-Identifier: Apache-2.0
"""Grouped products on Hopper GPUs: our kernels in Pallas Mosaic GPU."""
