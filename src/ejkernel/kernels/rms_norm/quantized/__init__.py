# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation with a result in 8 bits."""
