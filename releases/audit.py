"""Compares deploy/locks, or other locks, with the package index: `python releases/audit.py [LOCK...]`.

It ends with 1 when authors have withdrawn a release (yanked), when the index has quarantined or given up a project, or
when it has no file of a locked hash. It asks for no advisories, which scanners of bills of materials know.
An index that cannot be reached, or serves no JSON, is told and no failure.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LOCKS = Path(__file__).resolve().parents[1] / "deploy/locks"
PATIENCE_S = 20.0
JSON = "application/vnd.pypi.simple.v1+json"
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^ \\;]+)", re.MULTILINE)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_BAD_STATUS = ("quarantined", "deprecated")


def locked(text: str) -> Iterator[tuple[str, str, set[str]]]:
    """Name, version and hashes of each release in a lock."""
    pins = list(_PIN.finditer(text))
    for pin, following in zip(pins, [*pins[1:], None], strict=True):
        end = len(text) if following is None else following.start()
        yield pin[1], pin[2], set(_HASH.findall(text, pin.end(), end))


def index_url() -> str:
    """pip's index."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return os.environ.get("PIP_INDEX_URL") or asked or "https://pypi.org/simple"


def page_of(index: str, name: str) -> dict[str, Any]:
    """What the index says of a project. Raises OSError, or ValueError where it serves no JSON."""
    request = urllib.request.Request(f"{index.rstrip('/')}/{name}/", headers={"Accept": JSON})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        page: dict[str, Any] = json.load(answer)
    return page


def findings(name: str, version: str, hashes: set[str], page: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a locked release."""
    status = page.get("meta", {}).get("project-status") or page.get("project-status", {}).get("status")
    if status in _BAD_STATUS:
        yield f"{name}: the project is {status}"
    known = {file["hashes"].get("sha256"): file for file in page["files"]}
    if unknown := hashes - known.keys():
        yield f"{name} {version}: the index has no file of {len(unknown)} of {len(hashes)} hashes"
    if reasons := {str(known[each]["yanked"]) for each in hashes & known.keys() if known[each].get("yanked")}:
        yield f"{name} {version}: withdrawn: {'; '.join(sorted(reasons))}"


def main() -> int:
    """Print what is found; returns the exit status."""
    paths = [Path(path) for path in sys.argv[1:]] or sorted(LOCKS.glob("*.txt"))
    releases = {(name, version): hashes for path in paths for name, version, hashes in locked(path.read_text())}
    index, found, unknown = index_url(), list[str](), list[str]()

    def ask(name: str) -> dict[str, Any] | Exception:
        try:
            return page_of(index, name)
        except (OSError, ValueError) as error:
            return error

    with ThreadPoolExecutor(8) as pool:
        pages = dict(zip(releases, pool.map(ask, (name for name, _ in releases)), strict=True))
    for (name, version), page in pages.items():
        if isinstance(page, urllib.error.HTTPError) and page.code == 404:
            found.append(f"{name}: the index has no such project")
        elif isinstance(page, Exception):
            unknown.append(f"{name}: not known: {page}")
        else:
            found += findings(name, version, releases[name, version], page)
    sys.stdout.write("".join(f"{line}\n" for line in [*unknown[:3], *found]))
    sys.stdout.write(f"{len(releases)} releases: {len(found)} findings, {len(unknown)} not known\n")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
