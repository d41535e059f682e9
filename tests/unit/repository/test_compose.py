"""The Compose files: hardened, and started with commands that exist."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from specdec.commands.app import app
from specdec.config import CoordinatorSettings, DraftSettings, TargetSettings, load_settings
from specdec.gateway.settings import GatewaySettings

DEPLOY = Path(__file__).parents[3] / "deploy"
DOCKER_COMPOSE = DEPLOY.parent / ".tools" / "docker-compose"
SETTINGS: dict[str, type[Any]] = {
    "coordinator": CoordinatorSettings,
    "gateway": GatewaySettings,
    "target": TargetSettings,
    "draft": DraftSettings,
}
WITH_REDIS = ("coordinator", "target", "draft")
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
GPU: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def role_and_arguments(service: Mapping[str, Any]) -> tuple[str, list[str]]:
    """What `specdec serve` gets: the entrypoints of the images without an engine have the role already."""
    command: list[str] = service["command"]
    image = service["build"]["target"]
    return (image, command) if image in ("coordinator", "gateway") else (command[0], command[1:])


OURS = [
    pytest.param(name, service, id=f"{file}-{name}")
    for file, services in (("cpu", SERVICES), ("gpu", GPU["services"]))
    for name, service in services.items()
    if "build" in service
]


@pytest.mark.parametrize(("name", "service"), OURS)
def test_commands_load_as_settings(name: str, service: dict[str, Any]) -> None:
    role, arguments = role_and_arguments(service)
    cls = SETTINGS[role]
    load_settings(cls, arguments, env_prefix=cls.env_prefix, prog="test")
    assert role == name
    assert CliRunner().invoke(app, ["serve", role, *arguments, "--help"]).exit_code == 0


@pytest.mark.parametrize("name", SETTINGS)
def test_health_is_asked_for_by_the_images_own_command(name: str) -> None:
    _, command, *arguments = SERVICES[name]["healthcheck"]["test"]
    assert (command, arguments[0]) == ("specdec", "health")
    assert CliRunner().invoke(app, [*arguments, "--help"]).exit_code == 0


@pytest.mark.parametrize("name", SETTINGS)
def test_variables_of_the_services_are_settings(name: str) -> None:
    cls = SETTINGS[name]
    for variable in SERVICES[name]["environment"]:
        assert variable.removeprefix(cls.env_prefix).lower() in cls.model_fields


@pytest.mark.parametrize("name", WITH_REDIS)
def test_services_share_the_redis_and_register_under_the_address_that_the_coordinator_calls(name: str) -> None:
    cls = SETTINGS[name]
    given = SERVICES[name]["environment"]
    assert given[f"{cls.env_prefix}REDIS_URL"] == "redis://redis:6379/0"
    assert given[f"{cls.env_prefix}REDIS_PASSWORD"] == SERVICES["redis"]["environment"]["REDISCLI_AUTH"]
    assert given[f"{cls.env_prefix}ADVERTISE_ADDRESS"] == f"{name}:{cls.model_fields['port'].default}"
    assert set(SERVICES["redis"]["networks"]) <= set(SERVICES[name]["networks"])


def test_redis_is_reached_from_the_backend_only_and_keeps_nothing() -> None:
    redis = SERVICES["redis"]
    assert redis["networks"] == ["backend"] and "ports" not in redis and "volumes" not in redis
    assert "redis" not in {name for service in SERVICES.values() for name in service.get("depends_on", {})}


def test_the_coordinator_is_pointed_at_the_ports_that_the_engines_listen_on() -> None:
    _, arguments = role_and_arguments(SERVICES["coordinator"])
    settings = load_settings(CoordinatorSettings, arguments, env_prefix="SPECDEC_COORDINATOR_", prog="test")
    assert settings.targets == (f"target:{TargetSettings.model_fields['port'].default}",)
    assert settings.drafts == (f"draft:{DraftSettings.model_fields['port'].default}",)


def test_the_gateway_calls_the_coordinator_and_shows_its_metrics_to_prometheus_only() -> None:
    _, arguments = role_and_arguments(SERVICES["gateway"])
    settings = load_settings(GatewaySettings, arguments, env_prefix="SPECDEC_GATEWAY_", prog="test")
    assert settings.coordinators == (f"coordinator:{CoordinatorSettings.model_fields['port'].default}",)
    for name in ("gateway", "coordinator"):  # whoever reaches them needs no key, so only this machine may
        assert SERVICES[name]["environment"][f"SPECDEC_{name.upper()}_ALLOW_UNAUTHENTICATED"] == "true"
        assert all(port.startswith("127.0.0.1:") for port in SERVICES[name]["ports"])
    (published,) = SERVICES["gateway"]["ports"]
    assert published.endswith(f":{settings.port}")
    assert set(SERVICES["gateway"]["networks"]) == set(SERVICES["coordinator"]["networks"])
    (job,) = [
        job
        for job in yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
        if job["job_name"] == "gateway"
    ]
    dockerfile = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert f"SPECDEC_GATEWAY_METRICS_PORT={job['dns_sd_configs'][0]['port']}" in dockerfile


@pytest.mark.parametrize("name", SERVICES)
def test_services_are_hardened(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "unless-stopped"
    assert {"cpus", "memory", "pids"} <= service["deploy"]["resources"]["limits"].keys()
    assert service["healthcheck"]["test"][0] == "CMD"
    assert not service.keys() & {"privileged", "cap_add", "network_mode", "pid"}


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_published_on_loopback_only(name: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name].get("ports", []))


@pytest.mark.parametrize("name", ["target", "draft"])
def test_only_the_backend_network_reaches_engines(name: str) -> None:
    assert SERVICES[name]["networks"] == ["backend"]
    assert COMPOSE["networks"]["backend"] == {"internal": True}


@pytest.mark.parametrize("name", SERVICES)
def test_two_cores_and_a_busy_machine_are_enough(name: str) -> None:
    service = SERVICES[name]
    # Docker refuses a limit above the machine's cores.
    default = re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", service["deploy"]["resources"]["limits"]["cpus"])
    assert float(default) <= 2
    check = service["healthcheck"]
    if "specdec" in check["test"]:
        seconds = {key: float(check[key].removesuffix("s")) for key in ("interval", "timeout")}
        (patience,) = [float(flag.partition("=")[2]) for flag in check["test"] if flag.startswith("--timeout-s=")]
        # Asked twice: --end-hung asks again for three seconds before it kills.
        assert seconds["interval"] >= 10 and patience >= 5 and seconds["timeout"] > 2 * patience + 3


def test_dependencies_wait_for_health() -> None:
    waits = {name: service.get("depends_on", {}) for name, service in SERVICES.items()}
    assert waits["coordinator"].keys() == {"target", "draft"}
    assert waits["gateway"].keys() == {"coordinator"}
    assert all(wait == {"condition": "service_healthy"} for needs in waits.values() for wait in needs.values())


def test_streams_get_their_time_to_drain() -> None:
    for cls in SETTINGS.values():
        needed_s = cls.model_fields["drain_s"].default + cls.model_fields["stop_grace_s"].default
        assert all(float(service["stop_grace_period"].removesuffix("s")) > needed_s for service in SERVICES.values())


@pytest.mark.parametrize("name", SERVICES)
def test_folders_that_are_mounted_exist_and_are_mounted_read_only(name: str) -> None:
    for volume in SERVICES[name].get("volumes", []):
        source, target, *mode = volume.replace("${MODELS_DIR:-../models}", "../models").split(":")
        if source.startswith("."):
            assert (DEPLOY / source).is_dir(), target
            assert mode == ["ro"]
        else:
            assert source in COMPOSE["volumes"]


def test_the_override_gives_each_engine_a_gpu_and_the_cuda_image() -> None:
    assert GPU["services"].keys() == {"target", "draft"}
    for service in GPU["services"].values():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        assert service["build"]["target"] == "engine-cuda"
        assert "--device=cuda:0" in service["command"]


def test_no_image_is_latest_and_no_password_has_a_default() -> None:
    assert not [
        name for name, service in SERVICES.items() if "latest" in service["image"] or ":" not in service["image"]
    ]
    assert ":?" in SERVICES["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"]
    assert ":?" in SERVICES["redis"]["environment"]["REDISCLI_AUTH"]


@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.gpu.yaml"]])
def test_docker_compose_accepts_the_files(files: list[str]) -> None:
    passwords = {"GRAFANA_ADMIN_PASSWORD": "one", "REDIS_PASSWORD": "two"}
    named = [word for file in files for word in ("--file", file)]
    command = [str(DOCKER_COMPOSE), *named, "config", "--format", "json"]
    done = subprocess.run(command, cwd=DEPLOY, env=passwords, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    services = json.loads(done.stdout)["services"]
    assert services.keys() == SERVICES.keys()
    assert all(services[role]["environment"][f"SPECDEC_{role.upper()}_REDIS_PASSWORD"] == "two" for role in WITH_REDIS)
    is_gpu = len(files) == 2
    assert ("devices" in services["target"]["deploy"]["resources"].get("reservations", {})) == is_gpu


@pytest.mark.parametrize("missing", ["GRAFANA_ADMIN_PASSWORD", "REDIS_PASSWORD"])
def test_docker_compose_asks_for_a_password_that_is_not_chosen(missing: str) -> None:
    passwords = {"GRAFANA_ADMIN_PASSWORD": "one", "REDIS_PASSWORD": "two"}
    del passwords[missing]
    command = [str(DOCKER_COMPOSE), "--file", "compose.yaml", "config", "--quiet"]
    done = subprocess.run(command, cwd=DEPLOY, env=passwords, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert missing in done.stderr
