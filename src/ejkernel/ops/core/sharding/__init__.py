# SPDX-License-Identifier: Apache-2.0
"""Calls that split themselves over the devices of a mesh."""
