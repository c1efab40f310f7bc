# SPDX-License-Identifier: Apache-2.0
"""Attention: shared definitions, and one file or folder for each implementation.

All implementations share one residual contract, so the backward of one can follow the forward of another: the residuals
are the output and the float32 log-sum-exp `[batch, heads, queries]`.
"""
