# SPDX-License-Identifier: Apache-2.0
"""Layer normalisation: what its implementations share, and one file for each of them."""
