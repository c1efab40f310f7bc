# SPDX-License-Identifier: Apache-2.0
"""Attention of new tokens to a paged cache of keys and values, for inference."""
