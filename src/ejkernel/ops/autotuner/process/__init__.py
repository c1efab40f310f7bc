# SPDX-License-Identifier: Apache-2.0
"""Worker processes and threads of a search, and their messages."""
