# SPDX-License-Identifier: Apache-2.0
"""The tiers: the validity of their answers, and how a call's request reaches each of them."""
