# SPDX-License-Identifier: Apache-2.0
"""The configurations in force for a call's other direction: what its residuals come from, or go to."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from ejkernel.ops.autotuner.bench.residuals import partner_call
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.utils.error_text import error_text

logger = logging.getLogger(__name__)


def partners_in_force(
    chain: ConfigSelectorChain[Any, Any], inv: Invocation[Any, Any], kernel: Kernel[Any, Any] | None
) -> tuple[Any, ...]:
    """Return the chain's configurations for the backward of a forward call, or for the forward of a backward call.

    The result is empty if no residuals pass between the two. Nothing is tuned or remembered.
    """
    if kernel is None:
        return ()
    inv = dataclasses.replace(inv, kernel=kernel, override_cfg=None)
    try:
        partner = partner_call(inv)
    except Exception as error:  # noqa: BLE001 - a kernel need not have a gradient for every call
        logger.info("%s: the call of the other direction is not known: %s", inv.op_id, error_text(error))
        return ()
    if partner is None:
        return ()
    found = [consulted.resolution for consulted in chain.consult(partner, kernel)]
    return tuple(resolution.config for resolution in found if resolution is not None)
