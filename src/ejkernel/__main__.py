# SPDX-License-Identifier: Apache-2.0
"""`python -m ejkernel`."""

import sys

from ejkernel.cli import main

if __name__ == "__main__":
    sys.exit(main())
