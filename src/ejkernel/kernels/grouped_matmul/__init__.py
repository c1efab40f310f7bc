# SPDX-License-Identifier: Apache-2.0
"""Matrix products group by group: what their implementations share, and one file for each of them."""
