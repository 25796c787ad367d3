"""Set before any test imports torch: no GPU packages, no compilation."""

import os

from megatron_ext import cpu

os.environ.setdefault("OMP_NUM_THREADS", "1")
cpu.set_environment()
cpu.hide_gpu_packages()
