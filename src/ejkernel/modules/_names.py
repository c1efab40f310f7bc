# SPDX-License-Identifier: Apache-2.0
"""The names that arguments have in other libraries."""

from __future__ import annotations

from collections.abc import Mapping


def by_name(elsewhere: Mapping[str, str]) -> dict[str, str]:
    """Return our argument, or advice, for each name elsewhere.

    >>> by_name({"softmax_scale": "scale sm_scale", "heads are grouped; leave it out.": "enable_gqa"})
    {'scale': 'softmax_scale', 'sm_scale': 'softmax_scale', 'enable_gqa': 'heads are grouped; leave it out.'}

    Args:
        elsewhere: For each of our arguments, or piece of advice, the names elsewhere, separated by spaces.
    """
    return {name: ours for ours, names in elsewhere.items() for name in names.split()}
