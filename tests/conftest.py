"""For all tests: Triton, whoever imports it first, runs kernels in its interpreter, on the CPU."""

import os

os.environ["TRITON_INTERPRET"] = "1"
