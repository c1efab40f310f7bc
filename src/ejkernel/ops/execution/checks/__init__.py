# SPDX-License-Identifier: Apache-2.0
"""Checks whether a kernel keeps its contract, for its author's tests."""
