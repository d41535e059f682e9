"""Which module imports which, read from the sources: whole statements, wherever they stand, TYPE_CHECKING included."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

Graph = Mapping[str, frozenset[str]]


def import_graph(root: Path, packages: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """For each module, by dotted name: the modules of these packages that it imports. `packages`: names by folder.

    A package's own module (`__init__`) counts as a module; generated code does not count at all.
    """
    paths = {
        _module_name(path, root / folder, package): path
        for folder, package in packages.items()
        for path in _sources(root / folder)
    }
    return {name: frozenset(_imported(path, paths)) - {name} for name, path in paths.items()}


def circle(graph: Graph) -> list[str]:
    """Some circle, its first member repeated at the end; empty when there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def grouped(graph: Graph, depth: int) -> dict[str, frozenset[str]]:
    """The graph between folders: names cut to `depth` parts, without what is inside one of them."""
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


def _imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (found for name in names if (found := _longest_known(name, known)))


def _longest_known(name: str, known: Mapping[str, Path]) -> str:
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name
