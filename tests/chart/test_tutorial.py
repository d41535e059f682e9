"""The tutorial's Kubernetes part, run command by command: helm against an API server, tools of others recorded."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec import __version__
from tests.chart.api_server import Cluster, api_server
from tests.chart.rendered import HELM, ROOT, Document

_PART = re.search(r"(?ms)^## On Kubernetes\n(.*)", (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"))
assert _PART is not None
TEXT = _PART[1]
BLOCKS = re.findall(r"(?ms)^```sh\n(.*?)^```", TEXT)
RECORDER = """#!/bin/sh
printf '%s\\n' "$(basename "$0") $*" >> "$RECORDED"
"""
GENERATES = ".venv/bin/specdec generate"
"""Needs models; its arguments are held against the command in tests/unit/repository/test_tutorial.py."""


class Reader:
    """Types the commands of a block into a shell, and knows what other tools were told."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.cluster = cluster
        self._recorded = folder / "recorded"
        self._recorded.touch()
        tools = folder / "bin"
        tools.mkdir()
        (tools / "helm").symlink_to(HELM)
        for name in ("docker", "kubectl"):
            (tools / name).write_text(RECORDER)
            (tools / name).chmod(0o755)
        # What a shell keeps from one block to the next.
        (tag,) = re.findall(r"(?m)^export (TAG)=", "".join(BLOCKS))
        self._variables = {
            tag: __version__,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "HOME": str(folder),
            "KUBECONFIG": str(cluster.kubeconfig),
            "RECORDED": str(self._recorded),
        }

    def types(self, block: str) -> str:
        """What the commands of a block say; none fails."""
        lines = "\n".join(line for line in block.splitlines() if not line.startswith(GENERATES))
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", lines],
            cwd=ROOT,
            env=self._variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def told(self, *start: str) -> list[list[str]]:
        """The rest of each command of another tool that begins so."""
        lines = [shlex.split(line) for line in self._recorded.read_text().splitlines()]
        return [line[len(start) :] for line in lines if line[: len(start)] == list(start)]

    def deployments(self) -> dict[str, Document]:
        """Specifications by role."""
        found = {n.removeprefix("deployments/demo-specdec-"): o for n, o in self.cluster.workload.items()}
        return {role: o["spec"] for role, o in found.items() if o["kind"] == "Deployment"}

    def containers(self) -> Iterator[Document]:
        """Containers of all pods, with those that come first and those of tests and Jobs."""
        for document in self.cluster.workload.values():
            spec = document.get("spec", {})
            pod = spec if document["kind"] == "Pod" else spec.get("template", {}).get("spec", {})
            yield from (*pod.get("initContainers", []), *pod.get("containers", []))


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    with api_server(tmp_path) as cluster:
        yield Reader(tmp_path, cluster)


def test_the_part_works_from_its_first_command_to_its_last(reader: Reader) -> None:
    small, large, scaled = BLOCKS

    said = reader.types(small)
    assert said.count("Phase:          Succeeded") == 2, "helm test runs both tests"
    assert json.loads(said.split("POD LOGS: demo-specdec-complete\n")[1].split("\n")[0]) == {
        "ended": "demo-specdec-complete"
    }
    assert {words[0] for words in reader.told("docker", "push")} == {words[1] for words in reader.told("docker", "tag")}
    _pulls_only_what_was_pushed(reader)
    _asks_for_what_the_text_says(reader)
    volumes = [v for d in reader.deployments().values() for v in d["template"]["spec"]["volumes"]]
    claims = {v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v}
    assert len(claims) == 1 and f"`{claims.pop()}`" in TEXT

    reader.types(large)
    _pulls_only_what_was_pushed(reader)
    pods = {role: spec["template"]["spec"] for role, spec in reader.deployments().items()}
    assert not any("runtimeClassName" in pod for pod in pods.values())
    ((kind, name, *literals),) = reader.told("kubectl", "create", "secret")
    assert kind == "generic"
    made = {(name, literal.removeprefix("--from-literal=").partition("=")[0]) for literal in literals}
    for role in ("target", "draft"):
        (container,) = pods[role]["containers"]
        named = [v["valueFrom"]["secretKeyRef"] for v in container["env"] if v["name"] == "HF_TOKEN"]
        assert {(ref["name"], ref["key"]) for ref in named} == made
    ((resource, port),) = reader.told("kubectl", "port-forward")
    service = reader.cluster.named("Service", resource.removeprefix("service/"))
    assert int(port) in {each["port"] for each in service["spec"]["ports"]}

    before = reader.deployments()
    assert [before[role]["replicas"] for role in ("target", "coordinator")] == [1, 2]
    reader.types(scaled)
    assert reader.deployments() == {
        role: {**spec, "replicas": {"target": 2, "coordinator": 3}.get(role, spec["replicas"])}
        for role, spec in before.items()
    }


def test_the_runtime_class_of_the_text_reaches_both_engines(reader: Reader) -> None:
    (flag,) = re.findall(r"--set \S*runtimeClassName=\S+", TEXT)
    install = next(line for line in BLOCKS[1].splitlines() if line.startswith("helm"))
    reader.types(f"{install} {flag.rstrip('`;')}")
    classes = {role: spec["template"]["spec"].get("runtimeClassName") for role, spec in reader.deployments().items()}
    assert {role for role, name in classes.items() if name == "nvidia"} == {"target", "draft"}


def _pulls_only_what_was_pushed(reader: Reader) -> None:
    """Every image is in the reader's registry, under the tag of this version."""
    pushed = {words[0] for words in reader.told("docker", "push")}
    pulled = {container["image"] for container in reader.containers()}
    assert pulled <= pushed, pulled - pushed
    assert all(image.startswith("registry.example/") for image in pulled)
    assert any(image.endswith(f":{__version__}") for image in pulled)


def _asks_for_what_the_text_says(reader: Reader) -> None:
    said = re.search(r"asks for (\d+\.\d+) cores and (\d+\.\d+) GiB", TEXT)
    assert said is not None
    units = {"m": 0.001, "Mi": 1 / 1024, "Gi": 1.0, "": 1.0}

    def amount(text: str) -> float:
        number, unit = re.fullmatch(r"(\d+)(\D*)", str(text)).groups()  # type: ignore[union-attr]
        return int(number) * units[unit]

    pods = [spec["template"]["spec"] for spec in reader.deployments().values()]
    requests = [c["resources"]["requests"] for pod in pods for c in pod["containers"]]
    for resource, expected in zip(("cpu", "memory"), said.groups(), strict=True):
        total = sum(amount(request[resource]) for request in requests)
        assert total == pytest.approx(float(expected), abs=0.06), resource
