# SPDX-License-Identifier: Apache-2.0
"""Products of 8-bit operands on Hopper GPUs, by Pallas Mosaic GPU: dense is one group of the grouped product."""
