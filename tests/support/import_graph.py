"""The graph of imports, read from the sources: all import statements, also within functions and TYPE_CHECKING."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SERVICES = ("coordinator", "draft_service", "gateway", "target_service")
PACKAGES = {"specdec": "specdec", **{service: f"specdec.{service}" for service in SERVICES}}
"""Package names by folder."""
Graph = Mapping[str, frozenset[str]]


def import_graph(root: Path, packages: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """Imported modules of these packages, by the dotted name of each module. `packages`: names by folder.

    A package's `__init__` counts as a module; generated code does not count.
    """
    paths = _paths(root, packages)
    return {name: frozenset(_known(_read(path)[0], paths)) - {name} for name, path in paths.items()}


def foreign_imports(root: Path, packages: Mapping[str, str], start: str) -> dict[str, frozenset[str]]:
    """Top-level names imported from elsewhere, by each module that `start` leads to, itself included.

    Strings that name a module (`module` or `module:attribute`) count as imports, because processes are started by them.
    Raises KeyError where `start` is no module of these packages.
    """
    paths = _paths(root, packages)
    found: dict[str, frozenset[str]] = {}
    pending = {start}
    while pending:
        name = pending.pop()
        imported, texts = _read(paths[name])
        found[name] = frozenset(each.partition(".")[0] for each in imported if not _longest_known(each, paths))
        parents = {name.rpartition(".")[0]} & paths.keys()
        pending |= {*parents, *_known(imported, paths), *_started(texts, paths)} - found.keys()
    return found


def circle(graph: Graph) -> list[str]:
    """A circle of imports, with its first module repeated at the end; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def grouped(graph: Graph, depth: int) -> dict[str, frozenset[str]]:
    """The graph between folders: names cut to `depth` parts, without imports within a folder."""
    groups: dict[str, set[str]] = {}
    for name, imported in graph.items():
        group = _cut(name, depth)
        groups.setdefault(group, set()).update(_cut(other, depth) for other in imported)
    return {group: frozenset(others - {group}) for group, others in groups.items()}


def _cut(name: str, depth: int) -> str:
    return ".".join(name.split(".")[:depth])


def _sources(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*.py")) if "_pb2" not in path.name)


def _module_name(path: Path, folder: Path, package: str) -> str:
    parts = (*package.split("."), *path.relative_to(folder).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _paths(root: Path, packages: Mapping[str, str]) -> dict[str, Path]:
    return {
        _module_name(path, root / folder, package): path
        for folder, package in packages.items()
        for path in _sources(root / folder)
    }


@functools.cache
def _read(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """The names that a source imports, and its strings."""
    imported: set[str] = set()
    texts: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.add(node.value)
    return frozenset(imported), frozenset(texts)


def _started(texts: Iterable[str], known: Mapping[str, Path]) -> Iterator[str]:
    for text in texts:
        name = text.partition(":")[0]
        yield from (module for module in (name, f"{name}.__main__") if module in known)


def _known(names: Iterable[str], known: Mapping[str, Path]) -> Iterator[str]:
    return (found for name in names if (found := _longest_known(name, known)))


def _longest_known(name: str, known: Mapping[str, Path]) -> str:
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name
