"""Distributes tests to workers (`-n 2 --dist loadfile`): whole files, the longest first."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support import durations

FOLDERS_WITH_CLUSTERS = ("tests/chaos", "tests/clients", "tests/e2e", "tests/upgrade")


def scope_of(test: str) -> str:
    """Scope that one worker gets as a whole: a file, or a folder whose files share clusters."""
    file = test.partition("::")[0]
    return next((folder for folder in FOLDERS_WITH_CLUSTERS if file.startswith(f"{folder}/")), file)


class TogetherByCluster(LoadScopeScheduling):
    """Gives workers whole files, and whole folders whose files share clusters, so that each cluster starts once."""

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


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> TogetherByCluster | None:
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # pytest_collection_modifyitems has sorted them
    return TogetherByCluster(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In workers, sort the longest scopes first, so that none of them runs alone at the end."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    recorded: defaultdict[str, float] = defaultdict(float)
    for test, seconds in durations.read().items():
        recorded[scope_of(test)] += seconds
    items.sort(key=lambda item: (-recorded[scope_of(item.nodeid)], scope_of(item.nodeid)))
