# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation: what its implementations share, and one file for each of them."""
