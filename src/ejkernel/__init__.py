# SPDX-License-Identifier: Apache-2.0
"""JAX operations whose configuration is chosen, measured, remembered and explained by the library."""
