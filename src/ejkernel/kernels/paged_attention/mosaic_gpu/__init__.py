# SPDX-License-Identifier: Apache-2.0
"""Paged attention on Hopper GPUs: persistent programs share the blocks of all sequences evenly (stream-K)."""
