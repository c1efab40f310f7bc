# SPDX-License-Identifier: Apache-2.0
"""Where configurations come from and where they are kept."""
