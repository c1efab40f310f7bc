# SPDX-License-Identifier: Apache-2.0
"""Whether a kernel keeps its contract: what its author calls in a test."""
