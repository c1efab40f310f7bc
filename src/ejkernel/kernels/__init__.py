# SPDX-License-Identifier: Apache-2.0
"""The implementations behind `ejkernel.modules`: one folder per operation, one file per backend."""
