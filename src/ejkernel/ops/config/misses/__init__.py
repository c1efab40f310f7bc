# SPDX-License-Identifier: Apache-2.0
"""Calls without a usable configuration: notes of them on disk, the nearest entries, and entries that do not run."""
