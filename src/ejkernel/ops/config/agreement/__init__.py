# SPDX-License-Identifier: Apache-2.0
"""Agreement of all processes of a program on the configuration of each call."""
