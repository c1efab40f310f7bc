# SPDX-License-Identifier: Apache-2.0
"""Parts that depend on nothing else in the package but its errors."""
