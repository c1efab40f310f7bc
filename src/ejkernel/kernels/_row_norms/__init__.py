# SPDX-License-Identifier: Apache-2.0
"""Normalisation of rows on Hopper GPUs, by their root mean square or by mean and variance, in our kernels."""
