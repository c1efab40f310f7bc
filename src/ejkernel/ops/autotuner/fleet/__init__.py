# SPDX-License-Identifier: Apache-2.0
"""Tuning tasks carried out wherever an executor has workers."""
