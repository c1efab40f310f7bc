# SPDX-License-Identifier: Apache-2.0
"""Processes of one program that agree on every call's configuration."""
