# SPDX-License-Identifier: Apache-2.0
"""Attention: what its implementations share, and one file for each of them.

All share one contract, so that the forward of one may be followed by the backward of another: the forward's residuals
are its output and the log-sum-exp of every row, `[batch, heads, queries]` in float32.
"""
