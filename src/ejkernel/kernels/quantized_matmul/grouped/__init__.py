# SPDX-License-Identifier: Apache-2.0
"""Grouped products of 8-bit numbers with scales."""
