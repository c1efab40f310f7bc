# SPDX-License-Identifier: Apache-2.0
"""Ready operations: checked arguments, every implementation that is installed, and a configuration chosen for you."""

from .flash_attention import FlashAttention as FlashAttention
from .flash_attention import FlashAttentionConfig as FlashAttentionConfig
from .flash_attention import flash_attention as flash_attention
from .layer_norm import LayerNorm as LayerNorm
from .layer_norm import LayerNormConfig as LayerNormConfig
from .layer_norm import layer_norm as layer_norm
from .rms_norm import RmsNorm as RmsNorm
from .rms_norm import RmsNormConfig as RmsNormConfig
from .rms_norm import rms_norm as rms_norm
