# SPDX-License-Identifier: Apache-2.0
"""The loss on Hopper GPUs: a product's kernel with an epilogue that computes statistics and gradients of logits."""
