"""Where kernels in Triton run in tests: on a GPU, or without one in Triton's interpreter (see tests/conftest.py)."""

import os

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
