"""`python -m megatron_ext`: the launcher and the tools around it."""

import sys

from megatron_ext.cli import main

if __name__ == "__main__":
    sys.exit(main())
