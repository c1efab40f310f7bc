# SPDX-License-Identifier: Apache-2.0
"""Static values: identity, names, descriptions, and decoding of descriptions."""
