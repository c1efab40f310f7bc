# SPDX-License-Identifier: Apache-2.0
"""The tuner: it proposes, compiles, checks, times and remembers candidates."""
