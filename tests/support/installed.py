"""A Python that has what some requirements bring, and no more: this one, with the imports of all others blocked."""

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
    """The distributions that requirements bring with all that these require, as far as they are here."""
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
    """Names at the top of what is installed here, but not by these distributions nor by specdec."""
    kept = distributions | {"specdec"}
    return frozenset(
        module
        for module, brought_by in _brought_by().items()
        if not kept.intersection(map(canonicalize_name, brought_by))
    )


def environment_without(modules: Iterable[str], folder: Path, root: Path) -> dict[str, str]:
    """Variables for a Python that finds specdec in `root`, and none of these modules; `folder` is written to."""
    (folder / "sitecustomize.py").write_text(_BLOCKER)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPECDEC_")}
    blocked = json.dumps(sorted(modules))
    return {**kept, "BLOCKED_IMPORTS": blocked, "PYTHONPATH": f"{folder}{os.pathsep}{root}", "COLUMNS": "120"}
