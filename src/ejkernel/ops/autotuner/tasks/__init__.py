# SPDX-License-Identifier: Apache-2.0
"""One search from start to winner, in this process or in a worker."""
