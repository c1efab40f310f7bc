# SPDX-License-Identifier: Apache-2.0
"""Spaces of configurations: axes, constraints, and how they are walked."""
