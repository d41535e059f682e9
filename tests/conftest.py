"""What all tests share. Kept free of torch, so that tests of the coordinator's side start fast."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

pytest_plugins = ["tests.support.services.cluster_fixtures", "tests.support.fork_server.plugin"]
FOLDERS_WITH_CLUSTERS = ("tests/chaos", "tests/clients", "tests/e2e", "tests/upgrade")
PROCESS_FOLDERS = [
    Path(__file__).parent / name for name in ("integration", "clients", "e2e", "chaos", "upgrade", "security")
]

# Two workers with all cores' OpenMP threads each would stall one another. Read when torch is first imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test may depend on what the developer's shell says, or on a network.
for name in [name for name in os.environ if name.startswith("SPECDEC_") or name in ("NO_COLOR", "FORCE_COLOR")]:
    del os.environ[name]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Read when a kernel in Triton is defined: without a GPU it is interpreted.
if not glob.glob("/dev/nvidia[0-9]*"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
# The same examples in every run, and no verdict on how long one takes: a test fails or passes by what is tested.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")


class TogetherByCluster(LoadScopeScheduling):
    """Gives a worker whole files, and whole folders whose files share clusters: each is started once."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((folder for folder in FOLDERS_WITH_CLUSTERS if file.startswith(f"{folder}/")), file)

    def remove_node(self, node: Any) -> str | None:
        """A worker is gone: return the test that it was running. xdist's own would have that end other workers too."""
        units = self.assigned_work.pop(node)
        if not self._pending_of(units):
            return None
        crashed = next(test for unit in units.values() for test, is_done in unit.items() if not is_done)
        for scope, unit in units.items():
            if crashed in unit:
                unit[crashed] = True
            if not all(unit.values()):
                self.workqueue[scope] = unit
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: Any) -> None:
        if node in self.registered_collections:
            super()._reschedule(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> TogetherByCluster | None:
    return TogetherByCluster(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts processes."""
    for item in items:
        if any(folder in item.path.parents for folder in PROCESS_FOLDERS):
            item.add_marker(pytest.mark.integration)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """What a test, or a fixture of its module, sets for the log of the process is not left to the tests after it."""
    yield
    structlog.reset_defaults()
