"""What all tests share. Kept free of torch, so that tests of the coordinator's side start fast."""

from __future__ import annotations

import os

# Two workers with all cores' OpenMP threads each would stall one another. Read when torch is first imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test may depend on what the developer's shell says, or on a network.
for name in [name for name in os.environ if name.startswith("SPECDEC_")]:
    del os.environ[name]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
