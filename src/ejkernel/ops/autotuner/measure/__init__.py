# SPDX-License-Identifier: Apache-2.0
"""What a function costs, and whether its results are right."""
