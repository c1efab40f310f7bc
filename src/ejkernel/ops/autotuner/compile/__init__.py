# SPDX-License-Identifier: Apache-2.0
"""Compilation of candidates: in threads, in processes, and in bundles for devices of other machines."""
