# SPDX-License-Identifier: Apache-2.0
"""Data as text: encoding, strict decoding, and sealing with digests."""
