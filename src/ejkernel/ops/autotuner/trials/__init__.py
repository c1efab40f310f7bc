# SPDX-License-Identifier: Apache-2.0
"""Candidates and their outcomes: the vocabulary of the whole tuner."""
