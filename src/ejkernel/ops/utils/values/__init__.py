# SPDX-License-Identifier: Apache-2.0
"""What static values are: told apart, named, described, and read from their descriptions."""
