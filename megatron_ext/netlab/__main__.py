"""`python -m megatron_ext.netlab`: the same as scripts/netlab."""

import sys

from megatron_ext.netlab.cli import main

sys.exit(main(sys.argv[1:]))
