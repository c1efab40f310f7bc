# SPDX-License-Identifier: Apache-2.0
"""Processes and threads that work for a search, and what passes between them."""
