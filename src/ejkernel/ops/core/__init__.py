# SPDX-License-Identifier: Apache-2.0
"""What a kernel and a call are."""
