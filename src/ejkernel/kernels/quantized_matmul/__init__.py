# SPDX-License-Identifier: Apache-2.0
"""Matrix products of 8-bit numbers with scales."""
