# SPDX-License-Identifier: Apache-2.0
"""One search from its start to its winner, in this process or in a worker."""
