# SPDX-License-Identifier: Apache-2.0
"""Runs tuning tasks on the workers of an executor."""
