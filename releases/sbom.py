"""Writes the bill of materials of specdec[engine], in CycloneDX: `python releases/sbom.py FILE`.

It lists what is installed in this environment, without what only tests, checks and the site need. The same environment
gives the same bytes; with SOURCE_DATE_EPOCH its time is in them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import specdec

ROOT = Path(__file__).resolve().parents[1]
# Its own validation is left out: it takes twenty times as long as the rest.
TOOL = ["-m", "cyclonedx_py", "environment", "--no-validate", "--output-reproducible", "--of", "JSON"]


def environment_bill() -> dict[str, Any]:
    """Everything in this environment. Raises SystemExit when the tool fails."""
    command = [sys.executable, *TOOL, "--pyproject", str(ROOT / "pyproject.toml"), sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def direct_lines() -> list[str]:
    """What specdec[engine] asks for itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["engine"]]


def needs_of(root: str, lines: list[str]) -> dict[str, set[str]]:
    """What `root`, which asks for these, brings in: by name, what each package needs.

    The tool's own graph has what any extra would need, asked for or not. Raises SystemExit when a package is missing.
    """
    needs: dict[str, set[str]] = {}
    seen: set[tuple[str, str]] = set()
    pending = [(root, "", lines)]
    while pending:
        name, extra, asked_for = pending.pop()
        found = needs.setdefault(name, set())
        for requirement in map(Requirement, asked_for):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                other = str(canonicalize_name(requirement.name))
                found.add(other)
                new = {(other, asked) for asked in ("", *requirement.extras)} - seen
                seen |= new
                pending += [(*entry, installed_lines(other)) for entry in sorted(new)]
    return needs


def installed_lines(name: str) -> list[str]:
    """What an installed package asks for. Raises SystemExit."""
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError as error:
        raise SystemExit(f"{name} is not installed") from error


def restricted(bill: dict[str, Any], needs: dict[str, set[str]]) -> dict[str, Any]:
    """The bill with these packages only, below this version of specdec."""
    root = bill["metadata"]["component"]
    root["version"] = specdec.__version__
    root["purl"] = f"pkg:pypi/specdec@{specdec.__version__}"
    parts = {str(canonicalize_name(part["name"])): part for part in bill["components"]}
    refs = {name: root["bom-ref"] if name == "specdec" else parts[name]["bom-ref"] for name in needs}
    bill["components"] = [parts[name] for name in sorted(needs.keys() - {"specdec"})]
    bill["dependencies"] = [
        {"ref": refs[name], "dependsOn": sorted(refs[other] for other in needs[name])} for name in sorted(needs)
    ]
    return bill


def main(path: Path) -> None:
    """Write the bill into a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    bill = restricted(environment_bill(), needs_of("specdec", direct_lines()))
    path.write_text(json.dumps(bill, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
