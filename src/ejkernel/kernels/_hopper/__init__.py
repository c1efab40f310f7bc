# SPDX-License-Identifier: Apache-2.0
"""The library that our Hopper kernels share; importing it does not need Pallas Mosaic GPU.

`device`: limits of the chip. `pipeline`: barriers between producer and consumer warpgroups. `launch`: the launch, the
split of warpgroups and registers, and shared memory. `backend`: the one switch between GPU and interpreter.
`tile_shapes` and `products`: tiles and mainloop of matrix products.
"""

from .device import DTYPES as DTYPES
from .device import MULTIPROCESSORS as MULTIPROCESSORS
from .device import SHARED_MEMORY as SHARED_MEMORY
from .device import Registers as Registers
from .device import may_be_on_hopper as may_be_on_hopper
from .device import unavailable as unavailable
from .device import widest_swizzle as widest_swizzle
