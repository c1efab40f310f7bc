# SPDX-License-Identifier: Apache-2.0
"""Candidates made into programs: here, in processes of their own, for devices elsewhere."""
