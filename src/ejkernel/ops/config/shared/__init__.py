# SPDX-License-Identifier: Apache-2.0
"""Caches that machines share: the packs in a store, the copy on this machine, and the choice between entries."""
