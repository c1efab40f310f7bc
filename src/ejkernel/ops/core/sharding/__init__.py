# SPDX-License-Identifier: Apache-2.0
"""Calls that shard themselves over the devices of a mesh."""
