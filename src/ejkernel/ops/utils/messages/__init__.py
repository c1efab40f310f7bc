# SPDX-License-Identifier: Apache-2.0
"""Messages for users: suggestions for misspelt names, and warnings at the user's line."""
