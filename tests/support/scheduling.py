"""Distributes tests to workers (`-n 2 --dist loadfile`): whole files or folders, the longest first."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support import durations

SHARING_FOLDERS = (
    "tests/chaos", "tests/chart", "tests/clients", "tests/e2e", "tests/unit/drafting/role", "tests/unit/lossless",
    "tests/unit/overlap", "tests/unit/rejection", "tests/unit/target_service", "tests/upgrade",
)  # fmt: skip
"""Folders whose files share clusters, renders of the chart, or engines of a `conftest.py`."""
_UNKNOWN_S = 20.0
"""Processor seconds of a file without a record, which begins early."""


def scope_of(test: str) -> str:
    """Scope that one worker gets as a whole: a file, or a sharing folder."""
    file = test.partition("::")[0]
    return next((folder for folder in SHARING_FOLDERS if file.startswith(f"{folder}/")), file)


class TogetherByScope(LoadScopeScheduling):
    """Gives workers whole files and whole sharing folders, so that each cluster and each shared engine starts once."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def remove_node(self, node: Any) -> str | None:
        """Requeue the work of a lost worker without the test that it was running; returns that test.

        xdist's own method would let the test end other workers, too.
        """
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


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> TogetherByScope | None:
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # pytest_collection_modifyitems has sorted them
    return TogetherByScope(config, log)


def scope_seconds(tests: Iterable[str], recorded: Mapping[str, float]) -> dict[str, float]:
    """Expected processor seconds of each scope of these tests."""
    functions = {durations.function_of(test) for test in tests}
    files = {function.partition("::")[0] for function in functions}
    known = {name.partition("::")[0] for name in recorded}
    seconds: defaultdict[str, float] = defaultdict(float)
    for name in sorted(functions | files):  # a sum of floats depends on the order, and workers must agree
        seconds[scope_of(name)] += recorded.get(name, 0.0)
    for file in files - known:
        seconds[scope_of(file)] += _UNKNOWN_S
    return seconds


# Runs after -m has selected.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In workers, sort the longest scopes first, so that none of them runs alone at the end."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    seconds = scope_seconds((item.nodeid for item in items), durations.read())
    items.sort(key=lambda item: (-seconds[scope_of(item.nodeid)], scope_of(item.nodeid)))
