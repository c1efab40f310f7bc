# SPDX-License-Identifier: Apache-2.0
"""Quantising 1x128 blocks of rows, and of the transpose in the same pass."""
