# SPDX-License-Identifier: Apache-2.0
"""Data as text: written, read strictly, and sealed against damage."""
