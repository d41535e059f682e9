"""What all tests share. Kept free of torch, so that tests of the coordinator's side start fast."""

from __future__ import annotations

import gc
import glob
import logging
import os
from collections.abc import Generator, Iterator

import pytest
import structlog
from hypothesis import HealthCheck, settings

pytest_plugins = [
    "tests.support.services.cluster_fixtures",
    "tests.support.fork_server.plugin",
    "tests.support.durations",
    "tests.support.scheduling",
]
PROCESS_FOLDERS = tuple(f"tests/{name}/" for name in ("integration", "clients", "e2e", "chaos", "upgrade", "security"))

# Workers with all cores' OpenMP threads each would stall one another. Read when torch is first imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test may depend on what the developer's shell says, or on a network. `make test-isa` chooses the kernels.
for name in [name for name in os.environ if name.startswith("SPECDEC_") or name in ("NO_COLOR", "FORCE_COLOR")]:
    if name != "SPECDEC_NATIVE_ISA":
        del os.environ[name]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Read when a kernel in Triton is defined: without a GPU it is interpreted.
if not glob.glob("/dev/nvidia[0-9]*"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
# The same examples in every run, and no verdict on how long one takes: a test fails or passes by what is tested.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without collections of garbage, and leave the modules and items out of all later ones: they take seconds
    of each process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts processes."""
    for item in items:
        if item.nodeid.startswith(PROCESS_FOLDERS):
            item.add_marker(pytest.mark.integration)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """What a test, or a fixture of its module, sets for the log of the process is not left to the tests after it."""
    yield
    structlog.reset_defaults()
    logging.getLogger().setLevel(logging.WARNING)
