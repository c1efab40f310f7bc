# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation: shared definitions, and one file for each implementation."""
