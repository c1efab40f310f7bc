# SPDX-License-Identifier: Apache-2.0
"""Stored measurements of searches, and the saving of their results."""
