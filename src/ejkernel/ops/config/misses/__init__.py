# SPDX-License-Identifier: Apache-2.0
"""Calls without a measured configuration: notes of them on disk, and the nearest saved entries."""
