# SPDX-License-Identifier: Apache-2.0
"""The operations: they check their arguments and choose implementation and configuration for each call."""

from .flash_attention import FlashAttention as FlashAttention
from .flash_attention import FlashAttentionConfig as FlashAttentionConfig
from .flash_attention import flash_attention as flash_attention
from .flash_attention import from_zigzag as from_zigzag
from .flash_attention import to_zigzag as to_zigzag
from .grouped_matmul import GroupedMatmul as GroupedMatmul
from .grouped_matmul import GroupedMatmulActivation as GroupedMatmulActivation
from .grouped_matmul import GroupedMatmulActivationConfig as GroupedMatmulActivationConfig
from .grouped_matmul import GroupedMatmulConfig as GroupedMatmulConfig
from .grouped_matmul import GroupedMatmulWgrad as GroupedMatmulWgrad
from .grouped_matmul import GroupedMatmulWgradConfig as GroupedMatmulWgradConfig
from .grouped_matmul import QuantizedGroupedActivation as QuantizedGroupedActivation
from .grouped_matmul import QuantizedGroupedActivationConfig as QuantizedGroupedActivationConfig
from .grouped_matmul import QuantizedGroupedMatmul as QuantizedGroupedMatmul
from .grouped_matmul import QuantizedGroupedMatmulConfig as QuantizedGroupedMatmulConfig
from .grouped_matmul import QuantizedGroupedWgrad as QuantizedGroupedWgrad
from .grouped_matmul import QuantizedGroupedWgradConfig as QuantizedGroupedWgradConfig
from .grouped_matmul import grouped_matmul as grouped_matmul
from .grouped_matmul import grouped_matmul_wgrad as grouped_matmul_wgrad
from .kv_cache import OutOfPagesError as OutOfPagesError
from .kv_cache import PagePool as PagePool
from .kv_cache import append_to_pages as append_to_pages
from .kv_cache import copy_pages as copy_pages
from .layer_norm import LayerNorm as LayerNorm
from .layer_norm import LayerNormConfig as LayerNormConfig
from .layer_norm import layer_norm as layer_norm
from .linear_cross_entropy import LinearCrossEntropy as LinearCrossEntropy
from .linear_cross_entropy import LinearCrossEntropyConfig as LinearCrossEntropyConfig
from .linear_cross_entropy import LinearCrossEntropyGradients as LinearCrossEntropyGradients
from .linear_cross_entropy import LinearCrossEntropyGradientsConfig as LinearCrossEntropyGradientsConfig
from .linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from .linear_cross_entropy import token_log_probs as token_log_probs
from .paged_attention import PagedAttention as PagedAttention
from .paged_attention import PagedAttentionConfig as PagedAttentionConfig
from .paged_attention import PagedPlan as PagedPlan
from .paged_attention import paged_attention as paged_attention
from .paged_attention import paged_plan as paged_plan
from .quantized_dense import DelayedScaling as DelayedScaling
from .quantized_dense import quantized_dense as quantized_dense
from .quantized_dense import quantized_grouped_dense as quantized_grouped_dense
from .quantized_matmul import Quantize as Quantize
from .quantized_matmul import QuantizeConfig as QuantizeConfig
from .quantized_matmul import Quantized as Quantized
from .quantized_matmul import QuantizedMatmul as QuantizedMatmul
from .quantized_matmul import QuantizedMatmulConfig as QuantizedMatmulConfig
from .quantized_matmul import quantize as quantize
from .quantized_matmul import quantize_both as quantize_both
from .quantized_matmul import quantized_matmul as quantized_matmul
from .ragged_paged_attention import ragged_paged_attention as ragged_paged_attention
from .rms_norm import QuantizedRmsNorm as QuantizedRmsNorm
from .rms_norm import QuantizedRmsNormConfig as QuantizedRmsNormConfig
from .rms_norm import RmsNorm as RmsNorm
from .rms_norm import RmsNormConfig as RmsNormConfig
from .rms_norm import rms_norm as rms_norm

__all__ = [
    "DelayedScaling",
    "FlashAttention",
    "FlashAttentionConfig",
    "GroupedMatmul",
    "GroupedMatmulActivation",
    "GroupedMatmulActivationConfig",
    "GroupedMatmulConfig",
    "GroupedMatmulWgrad",
    "GroupedMatmulWgradConfig",
    "LayerNorm",
    "LayerNormConfig",
    "LinearCrossEntropy",
    "LinearCrossEntropyConfig",
    "LinearCrossEntropyGradients",
    "LinearCrossEntropyGradientsConfig",
    "OutOfPagesError",
    "PagePool",
    "PagedAttention",
    "PagedAttentionConfig",
    "PagedPlan",
    "Quantize",
    "QuantizeConfig",
    "Quantized",
    "QuantizedGroupedActivation",
    "QuantizedGroupedActivationConfig",
    "QuantizedGroupedMatmul",
    "QuantizedGroupedMatmulConfig",
    "QuantizedGroupedWgrad",
    "QuantizedGroupedWgradConfig",
    "QuantizedMatmul",
    "QuantizedMatmulConfig",
    "QuantizedRmsNorm",
    "QuantizedRmsNormConfig",
    "RmsNorm",
    "RmsNormConfig",
    "append_to_pages",
    "copy_pages",
    "flash_attention",
    "from_zigzag",
    "grouped_matmul",
    "grouped_matmul_wgrad",
    "layer_norm",
    "linear_cross_entropy",
    "paged_attention",
    "paged_plan",
    "quantize",
    "quantize_both",
    "quantized_dense",
    "quantized_grouped_dense",
    "quantized_matmul",
    "ragged_paged_attention",
    "rms_norm",
    "to_zigzag",
    "token_log_probs",
]
