# SPDX-License-Identifier: Apache-2.0
"""What a user reads: names that come close to a misspelt one, and warnings at the user's own line."""
