# SPDX-License-Identifier: Apache-2.0
"""Layer normalisation: shared definitions, and one file for each implementation."""
