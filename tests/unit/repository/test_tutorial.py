"""Each command of docs/tutorial.md exists and takes the arguments that are given there.

The Kubernetes part runs in tests/chart/test_tutorial.py, the container part in tests/images (`make test-images`).
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer

from specdec.commands.app import app

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"(?ms)^```sh\n(.*?)^```", PAGE) for line in block.splitlines()]
PASSWORDS = {"GRAFANA_ADMIN_PASSWORD": "g", "REDIS_PASSWORD": "r"}
ELSEWHERE = {"helm", "kubectl", "export", "for"}
"""The Kubernetes part's."""


def commands_of(program: str) -> list[list[str]]:
    return [words[1:] for line in COMMANDS if (words := shlex.split(line))[0] == program]


def run(*command: object, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_programs_are_known_here() -> None:
    programs = {shlex.split(line)[0] for line in COMMANDS}
    assert programs == {"make", ".venv/bin/specdec", "deploy/build.sh", "docker", "helm"} | ELSEWHERE


@pytest.mark.parametrize("arguments", commands_of(".venv/bin/specdec"), ids=" ".join)
def test_specdec_takes_the_arguments(arguments: list[str], tmp_path: Path) -> None:
    for name, text in {"prompts.txt": "def f():\n", "tuned.yaml": "up:\n  device: cpu\n"}.items():
        (tmp_path / name).write_text(text)
    group = typer.main.get_command(app)
    with group.make_context("specdec", list(arguments)) as context:
        name, command, rest = group.resolve_command(context, list(arguments))  # type: ignore[attr-defined]
        rest = [str(tmp_path / part) if (tmp_path / part).is_file() else part for part in rest]
        command.make_context(name, rest, parent=context)


def test_make_has_the_targets() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for (target,) in commands_of("make"):
        assert re.search(rf"(?m)^{target}:", makefile), target


def test_the_images_that_are_built_are_stages_of_the_dockerfile() -> None:
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    (stages,) = commands_of("deploy/build.sh")
    assert [stage for stage in stages if not re.search(rf"(?m)^FROM \S+ AS {stage}$", dockerfile)] == []


def test_compose_accepts_its_command() -> None:
    (arguments,) = commands_of("docker")
    start = arguments.index("up")
    assert "coordinator:" in run(ROOT / ".tools/docker-compose", *arguments[1:start], "config", **PASSWORDS)


def test_each_command_of_the_container_part_is_typed_where_images_are_tried() -> None:
    """tests/images/build.sh types the build, tests/images/compose.sh all others."""
    (block,) = re.findall(r"(?ms)^## In containers\n.*?^```sh\n(.*?)^```", PAGE)
    (reads,) = re.findall(r"(?m)^mapfile .*$", (ROOT / "tests" / "images" / "compose.sh").read_text(encoding="utf-8"))
    typed = run("bash", "-c", f'{reads}\nprintf "%s\\n" "${{typed[@]}}"')
    assert typed == block
    assert [line for line in block.splitlines() if line.startswith("deploy/build.sh")] == block.splitlines()[:1]
