# SPDX-License-Identifier: Apache-2.0
"""Caches that machines share: what lies in a bucket, its copy on this machine, and which of two entries is better."""
