# SPDX-License-Identifier: Apache-2.0
"""Candidates compiled, checked against what is right, and timed."""
