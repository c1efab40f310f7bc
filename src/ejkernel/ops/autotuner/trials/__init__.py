# SPDX-License-Identifier: Apache-2.0
"""Candidates and what became of them: the words that all of the tuner shares."""
