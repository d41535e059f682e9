"""The Dockerfile: clean, hardened, and started with commands that exist."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2
from packaging.requirements import Requirement
from typer.testing import CliRunner

import specdec
from specdec.commands.app import app
from specdec.config import CoordinatorSettings, DraftSettings, TargetSettings, load_settings
from specdec.gateway.settings import GatewaySettings
from tests.support.dockerfile import (
    DOCKERFILE,
    FINAL,
    STAGES,
    copied_stages,
    environment,
    last,
    requirements_of_image,
)
from tests.support.services.gateways import gateway
from tests.support.services.health import served_health

ROOT = Path(__file__).parents[3]
SETTINGS: dict[str, type[Any]] = {
    "coordinator": CoordinatorSettings,
    "gateway": GatewaySettings,
    "target": TargetSettings,
    "draft": DraftSettings,
}
REQUIRED = {
    "coordinator": ["--targets=target:50052"],
    "gateway": ["--coordinators=coordinator:50051"],
    "target": ["--model=/models/target"],
    "draft": ["--model=/m"],
}
SMALL = ("coordinator", "gateway")
"""Images without an engine."""
ENGINES = tuple(stage for stage in FINAL if stage not in SMALL)


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_every_base_comes_from_the_argument_or_another_stage() -> None:
    bases = {rest for stage in STAGES.values() for keyword, rest in stage if keyword == "FROM"}
    assert bases - STAGES.keys() == {"${PYTHON_IMAGE}"}


@pytest.mark.parametrize("stage", FINAL)
def test_final_stages_run_as_a_user_that_is_not_root_and_stop_on_sigterm(stage: str) -> None:
    assert last(stage, "USER") == "10001:10001"
    assert last(stage, "STOPSIGNAL") == "SIGTERM"


@pytest.mark.parametrize("stage", FINAL)
def test_final_stages_are_labelled(stage: str) -> None:
    labels = " ".join(rest for keyword, rest in STAGES[stage] if keyword == "LABEL")
    for key in ("title", "description", "version", "revision", "source", "licenses", "base.name"):
        assert f"org.opencontainers.image.{key}=" in labels


@pytest.mark.parametrize("stage", FINAL)
def test_a_change_of_a_source_installs_nothing_again_but_specdec(stage: str) -> None:
    """A builder runs again what follows the first instruction that it knows nothing of."""
    *dependencies, application = copied_stages(stage)
    assert application == "application"
    for built in dependencies:
        copied = [rest for keyword, rest in STAGES[built] if keyword == "COPY"]
        assert copied and all(rest.startswith("--from=requirements ") for rest in copied)
    copied = [rest for keyword, rest in STAGES["requirements"] if keyword == "COPY"]
    assert copied == ["pyproject.toml ./", "deploy/locks locks", "deploy/finish.py ./"]
    runs = [rest for keyword, rest in STAGES["application"] if keyword == "RUN" and "pip" in rest.split("&&")[0]]
    assert runs and all("--no-deps" in rest.split() for rest in runs)


@pytest.mark.parametrize("stage", FINAL)
def test_nothing_is_run_or_copied_after_what_differs_in_every_build(stage: str) -> None:
    keywords = [keyword for keyword, _ in STAGES[stage]]
    names = [rest.partition("=")[0] for _, rest in STAGES[stage]]
    first = min(names.index(name) for name in ("VERSION", "REVISION", "CREATED"))
    assert set(keywords[first:]) == {"ARG", "LABEL"}


def built_with(**variables: str) -> list[str]:
    """The builder's arguments for one image, a word each."""
    script = ROOT / "deploy" / "build.sh"
    environment = {**os.environ, "BUILDER": "echo", **variables}
    done = subprocess.run(["bash", script, "coordinator"], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_an_image_is_labelled_with_its_version_and_source_and_attested_where_that_is_asked_for() -> None:
    words = built_with(SOURCE="https://example.org/specdec", ATTEST="1")
    assert f"VERSION={specdec.__version__}" in words
    assert "SOURCE=https://example.org/specdec" in words
    assert {"--sbom=true", "--provenance=mode=max"} <= set(words)
    assert f"specdec-coordinator:{specdec.__version__}" in words
    assert "--sbom=generator=scanners/own:1" in built_with(ATTEST="1", SBOM_SCANNER="scanners/own:1")
    assert not [word for word in built_with() if word.startswith(("--sbom", "--provenance"))]


@pytest.mark.parametrize("stage", SMALL)
def test_coordinator_and_gateway_have_neither_build_tools_nor_an_engine(stage: str) -> None:
    runs = " ".join(rest for keyword, rest in STAGES[stage] if keyword == "RUN")
    assert not re.search(r"\b(apt-get|install)\b", runs)
    assert "pip uninstall" in runs
    assert copied_stages(stage) == [f"build-{stage}", "application"]
    installed = [rest for built in copied_stages(stage) for keyword, rest in STAGES[built] if keyword == "RUN"]
    assert not [rest for rest in installed if "torch" in rest or "engine" in rest]


def test_kernels_are_built_with_the_application_and_only_the_image_with_cuda_keeps_a_compiler() -> None:
    runs = {stage: [rest for keyword, rest in STAGES[stage] if keyword == "RUN"] for stage in ("application", *FINAL)}
    assert {stage for stage in runs if any("g++" in run for run in runs[stage])} == {"application", "engine-cuda"}
    compiler, wheel = runs["application"][-2:]
    assert "g++" in compiler and wheel.endswith(" .")
    assert "SPECDEC_PURE_WHEEL" not in environment("application")


@pytest.mark.parametrize("stage", SMALL)
def test_what_images_without_an_engine_install_brings_no_tensors(stage: str) -> None:
    found = {Requirement(line).name for line in requirements_of_image(stage)}
    assert {"grpcio", "pydantic-core"} <= found, "requirements of requirements are there"
    assert not found & {"numpy", "torch", "transformers"}


@pytest.mark.parametrize("stage", FINAL)
def test_no_start_compiles_bytecode_anew(stage: str) -> None:
    """Nothing can be written at run time, and file times do not survive every builder: see the Dockerfile."""
    for built in copied_stages(stage):
        assert "SOURCE_DATE_EPOCH" in environment(built)
        installs = [
            command
            for keyword, rest in STAGES[built]
            if keyword == "RUN"
            for command in rest.split("&&")
            if "/opt/specdec/bin/python install" in command
        ]
        assert installs and all("--compile" in command.split() for command in installs)
    assert any("compileall -q --invalidation-mode checked-hash" in rest for _, rest in STAGES[stage])


@pytest.mark.parametrize("stage", ENGINES)
def test_engines_write_caches_to_the_volume_only(stage: str) -> None:
    volume = last(stage, "VOLUME")
    caches = ("SPECDEC_NATIVE_CACHE", "XDG_CACHE_HOME", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    assert all(environment(stage)[name].startswith(volume) for name in caches)
    assert environment(stage)["HOME"] == "/tmp"


@pytest.mark.parametrize(
    ("stage", "role"),
    [
        ("coordinator", "coordinator"),
        ("gateway", "gateway"),
        ("engine-cpu", "target"),
        ("engine-cpu", "draft"),
        ("engine-cuda", "target"),
        ("engine-cuda", "draft"),
    ],
)
def test_entrypoints_are_commands_whose_settings_load(stage: str, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entrypoint = json.loads(last(stage, "ENTRYPOINT"))
    command = entrypoint if stage in SMALL else [*entrypoint, role]
    assert command == ["specdec", "serve", role]
    for name, value in environment(stage).items():
        if name.startswith("SPECDEC_"):
            monkeypatch.setenv(name, value)
    cls = SETTINGS[role]
    settings = load_settings(cls, REQUIRED[role], env_prefix=cls.env_prefix, prog="test")
    assert settings.health_port == int(environment(stage)["SPECDEC_HEALTH_ADDRESS"].rpartition(":")[2])
    exposed = last(stage, "EXPOSE").split()
    assert {str(settings.port), str(settings.metrics_port), str(settings.health_port)} <= set(exposed)
    result = CliRunner().invoke(app, [*command[1:], "--help"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("stage", [stage for stage in FINAL if stage != "gateway"])
def test_the_health_check_of_each_image_is_the_command_that_asks_the_health_port(stage: str) -> None:
    _, _, check = last(stage, "HEALTHCHECK").partition("CMD ")
    program, *arguments = json.loads(check)
    assert program == "specdec"
    with served_health(health_pb2.HealthCheckResponse.SERVING) as address:
        result = CliRunner().invoke(app, arguments, env={"SPECDEC_HEALTH_ADDRESS": address})
    assert result.exit_code == 0, result.output


async def test_the_health_check_of_the_gateways_image_asks_its_health_port_over_http() -> None:
    _, _, check = last("gateway", "HEALTHCHECK").partition("CMD ")
    program, *arguments = json.loads(check)
    assert program == "specdec"
    given = environment("gateway")
    assert given["SPECDEC_HEALTH_ADDRESS"] == f"http://127.0.0.1:{given['SPECDEC_GATEWAY_HEALTH_PORT']}"
    async with gateway("127.0.0.1:1", health_port=0) as one:
        address = {"SPECDEC_HEALTH_ADDRESS": f"http://127.0.0.1:{one.health_port}"}
        result = await asyncio.to_thread(CliRunner().invoke, app, arguments, env=address)
    assert (result.exit_code, "NOT_SERVING" in result.stdout) == (1, True), result.output


def test_a_service_that_does_not_serve_is_unhealthy() -> None:
    with served_health(health_pb2.HealthCheckResponse.NOT_SERVING) as address:
        result = CliRunner().invoke(app, ["health", "--address", address])
    assert result.exit_code == 1
    assert "NOT_SERVING" in result.stdout


def test_a_service_that_is_not_there_is_unhealthy_with_a_reason() -> None:
    with served_health(health_pb2.HealthCheckResponse.SERVING) as address:
        pass
    result = CliRunner().invoke(app, ["health", "--address", address])
    assert result.exit_code == 6
    assert "UNAVAILABLE" in result.stderr
    assert "Traceback" not in result.output


def test_an_unknown_service_name_is_unhealthy() -> None:
    with served_health(health_pb2.HealthCheckResponse.SERVING) as address:
        result = CliRunner().invoke(app, ["health", "--address", address, "--service", "no.such.Service"])
    assert result.exit_code == 3


def test_only_what_the_images_install_is_sent_to_the_builder() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in lines
    sent = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        source
        for stage in ("requirements", "application")
        for keyword, rest in STAGES[stage]
        if keyword == "COPY"
        for source in rest.split()[:-1]
    }  # fmt: skip
    assert sent == copied
