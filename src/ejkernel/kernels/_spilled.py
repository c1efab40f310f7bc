# SPDX-License-Identifier: Apache-2.0
"""The weights of intermediate values in the estimate of vector memory, by kind of kernel.

Written by `python -m benchmarks.memory_tpu_fit`.
"""

from __future__ import annotations

WEIGHTS: dict[str, dict[str, float]] = {'layer norm, backward': {'loop': 3.218, 'once': 1.821, 'more': 1.56, 'loop, tpu:tpu_v5_lite': 0.228, 'loop, tpu:tpu_v6_lite': 1.105}, 'layer norm, forward': {'once': 0.131, 'more': 1.795, 'more, tpu:tpu_v6_lite': 0.091}, 'paged, bfloat16, partial': {'scores': 0.777, 'rows': 3.224, 'keys': 1.199, 'scores of heads': 0.041, 'rows of heads': 0.414}, 'paged, bfloat16, whole': {'keys': 0.743, 'scores of heads': 1.54, 'rows of heads': 4.459, 'keys of heads': 0.464}, 'paged, bfloat16, wide unit': {'rows': 0.32, 'keys': 0.257, 'scores of heads': 1.187, 'rows of heads': 3.243, 'keys of heads': 0.365, 'constant': 3.112}, 'paged, float32, partial': {'scores': 2.732, 'rows': 1.803, 'rows of heads': 0.23, 'keys of heads': 0.091}, 'paged, float32, whole': {'rows': 1.655, 'keys': 0.846, 'scores of heads': 3.123, 'rows of heads': 0.145}, 'paged, float32, wide unit': {'scores of heads': 0.954, 'rows of heads': 4.012, 'keys of heads': 0.335}, 'rms norm, backward': {'loop': 2.633, 'once': 0.845, 'more': 3.771, 'loop, tpu:tpu_v5_lite': 0.228, 'once, tpu:tpu_v6_lite': 0.066}, 'rms norm, forward': {'once': 0.066, 'more': 0.813, 'more, tpu:tpu_v6_lite': 0.033}, 'grouped product, bfloat16': {'sums': 1.0, 'left': 1.0}, 'grouped product, float32': {'sums': 1.0, 'left': 1.0}, 'grouped product, single, bfloat16': {'sums': 1.0, 'left': 1.0}, 'grouped product, single, float32': {'sums': 1.0, 'left': 1.0}, 'grouped weights, bfloat16': {'sums': 1.0, 'left': 1.0}, 'grouped weights, float32': {'sums': 1.0, 'left': 1.0}}
