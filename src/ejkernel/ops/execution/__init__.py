# SPDX-License-Identifier: Apache-2.0
"""Running and tuning kernels."""
