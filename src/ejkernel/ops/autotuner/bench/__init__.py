# SPDX-License-Identifier: Apache-2.0
"""Compiling, checking and timing the candidates of a search."""
