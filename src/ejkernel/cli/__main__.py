# SPDX-License-Identifier: Apache-2.0
"""`python -m ejkernel.cli`."""

import sys

from ejkernel.cli import main

sys.exit(main())
