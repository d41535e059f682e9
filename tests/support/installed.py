"""This Python with only the distributions of some requirements; imports of all others are blocked."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_BLOCKER = """
import json, os, sys

_BLOCKED = frozenset(json.loads(os.environ["BLOCKED_IMPORTS"]))


class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in _BLOCKED else self.finder.find_spec(name, path, target)


sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


def distributions_of(requirements: Iterable[str]) -> frozenset[str]:
    """Requirements' distributions and their dependencies, followed as far as they are installed here."""
    found: set[tuple[str, str]] = set()
    pending = [(Requirement(line), "") for line in requirements]
    while pending:
        requirement, extra = pending.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in found:
                found.add((name, wanted))
                try:
                    pending += [(Requirement(line), wanted) for line in metadata.requires(name) or ()]
                except metadata.PackageNotFoundError:
                    continue
    return frozenset(name for name, _ in found)


_brought_by = functools.cache(metadata.packages_distributions)


def modules_without(distributions: frozenset[str]) -> frozenset[str]:
    """Top-level modules installed here by other distributions than these and specdec."""
    kept = distributions | {"specdec"}
    return frozenset(
        module
        for module, brought_by in _brought_by().items()
        if not kept.intersection(map(canonicalize_name, brought_by))
    )


def environment_without(modules: Iterable[str], folder: Path, root: Path) -> dict[str, str]:
    """Environment variables for a Python that finds specdec in `root` and none of `modules`; writes to `folder`."""
    (folder / "sitecustomize.py").write_text(_BLOCKER)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPECDEC_")}
    blocked = json.dumps(sorted(modules))
    return {**kept, "BLOCKED_IMPORTS": blocked, "PYTHONPATH": f"{folder}{os.pathsep}{root}", "COLUMNS": "120"}
