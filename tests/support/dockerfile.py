"""Stages of the images' Dockerfile, and the requirements that they install."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
LOCKS = ROOT / "deploy" / "locks"
FINAL = ("coordinator", "gateway", "engine-cpu", "engine-cuda")
"""Stages that become images."""


def parsed_stages() -> dict[str, list[tuple[str, str]]]:
    """Instructions of each stage by its name, preceded by those of its base stages."""
    text = re.sub(r"(?m)^#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"))
    stages: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        keyword, _, rest = line.strip().partition(" ")
        if keyword == "FROM":
            base, _, name = rest.partition(" AS ")
            stages[name] = [*stages.get(base, []), ("FROM", base)]
        elif keyword and name:
            stages[name].append((keyword, rest.strip()))
    return stages


STAGES = parsed_stages()


def last(stage: str, keyword: str) -> str:
    return [rest for found, rest in STAGES[stage] if found == keyword][-1]


def environment(stage: str) -> dict[str, str]:
    pairs = " ".join(rest for keyword, rest in STAGES[stage] if keyword == "ENV")
    return dict(pair.split("=", 1) for pair in pairs.split())


def copied_stages(stage: str) -> list[str]:
    """The stages that a stage copies from, in this order."""
    return [
        rest.split()[0].removeprefix("--from=")
        for keyword, rest in STAGES[stage]
        if keyword == "COPY" and rest.startswith("--from=")
    ]


def requirement_files(folder: Path) -> dict[str, list[str]]:
    """Requirements of each file that the build installs from: those that it writes from pyproject.toml in `folder`, and
    the locks, whose hashes are left out."""
    (command,) = [rest for keyword, rest in STAGES["requirements"] if keyword == "RUN" and "tomllib" in rest]
    (folder / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    subprocess.run(["sh", "-euc", command], cwd=folder, check=True)
    written = {path.name: path.read_text(encoding="utf-8").splitlines() for path in folder.glob("*.txt")}
    return written | {f"locks/{path.name}": list(locked(path)) for path in LOCKS.glob("*.txt")}


def locked(path: Path) -> dict[str, list[str]]:
    """Hashes of each requirement of a lock."""
    found: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").replace("\\\n", "").splitlines():
        requirement, *hashes = line.split(" --hash=")
        if not line.startswith("#"):
            found[requirement.strip()] = [each.strip() for each in hashes]
    return found


def requirements_of_image(stage: str, folder: Path) -> list[str]:
    """Requirements that pip installs into an image, from the files that its stages name."""
    written = requirement_files(folder)
    commands = [rest for built in copied_stages(stage) for keyword, rest in STAGES[built] if keyword == "RUN"]
    names = [name for command in commands for name in re.findall(r"-r /requirements/(\S+)", command)]
    return [line for name in names for line in written[name]]
