"""Stages of the images' Dockerfile, and the requirements that they install."""

from __future__ import annotations

import re
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


def arguments(stage: str) -> dict[str, str]:
    """Default values of the build's arguments that a stage declares."""
    return {rest.partition("=")[0]: rest.partition("=")[2] for keyword, rest in STAGES[stage] if keyword == "ARG"}


def copied_stages(stage: str) -> list[str]:
    """The stages that a stage copies from, in this order."""
    return [
        rest.split()[0].removeprefix("--from=")
        for keyword, rest in STAGES[stage]
        if keyword == "COPY" and rest.startswith("--from=")
    ]


def locked(path: Path) -> dict[str, list[str]]:
    """Hashes of each requirement of a lock."""
    found: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").replace("\\\n", "").splitlines():
        requirement, *hashes = line.split(" --hash=")
        if not line.startswith("#"):
            found[requirement.strip()] = [each.strip() for each in hashes]
    return found


def requirements_of_image(stage: str) -> list[str]:
    """What pip installs into an image: torch where it is asked for by name, and what locks name."""
    commands = [rest for built in copied_stages(stage) for keyword, rest in STAGES[built] if keyword == "RUN"]
    torch = [
        f"torch=={arguments(built)[name].partition('==')[2]}"
        for built in copied_stages(stage)
        for name in ("TORCH_CPU", "TORCH_CUDA")
        if name in arguments(built)
    ]
    locks = [name for command in commands for name in re.findall(r"-r /requirements/locks/(\S+)", command)]
    return [*torch, *(line for name in locks for line in locked(LOCKS / name))]
