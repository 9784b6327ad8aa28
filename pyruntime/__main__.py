# SPDX-License-Identifier: Apache-2.0
"""`python -m farandole` runs the command `farandole` even if its script is not on PATH."""

import sys

from farandole.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
