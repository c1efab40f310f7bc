# SPDX-License-Identifier: Apache-2.0
"""Utilities that depend only on the errors of this package."""
