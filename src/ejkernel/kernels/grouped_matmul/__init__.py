# SPDX-License-Identifier: Apache-2.0
"""Grouped matrix products: shared definitions, and one file or folder for each implementation."""
