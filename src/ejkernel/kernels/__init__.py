# SPDX-License-Identifier: Apache-2.0
"""The implementations behind `ejkernel.modules`: a folder an operation, a file a backend."""
