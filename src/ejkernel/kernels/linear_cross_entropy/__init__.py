# SPDX-License-Identifier: Apache-2.0
"""The language-model head's loss: a product and its cross-entropy, without all logits in memory."""
