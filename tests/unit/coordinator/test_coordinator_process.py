"""What several coordinator processes are started with: a port held for them, secrets, names."""

from __future__ import annotations

import json
import select
import socket
from pathlib import Path

import pytest
from pydantic import SecretStr

from specdec.config import CoordinatorSettings
from specdec.coordinator.child_process import CoordinatorProcess, as_json, reserved_port
from specdec.coordinator.supervisor import process_settings
from specdec.service.listening import StartupFailed

HOST = "127.0.0.1"
PATIENCE_S = 60.0


def listener(port: int, *, shares: bool) -> socket.socket:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shares))
    server.bind((HOST, port))
    server.listen()
    return server


def make_settings(**changes: object) -> CoordinatorSettings:
    settings = {"targets": ("a:1",), "redis_url": SecretStr("redis://:word@b:1"), "num_processes": 3, **changes}
    return CoordinatorSettings(**settings)  # type: ignore[arg-type]


def test_several_servers_can_listen_on_a_reserved_port_and_get_all_its_connections() -> None:
    with reserved_port(HOST, 0) as port, listener(port, shares=True) as one, listener(port, shares=True) as two:
        for _ in range(32):
            with socket.create_connection((HOST, port)):
                (server,), _, _ = select.select([one, two], [], [], PATIENCE_S)
                server.accept()[0].close()


@pytest.mark.parametrize("shares", [False, True])
def test_a_port_where_another_server_listens_is_not_reserved(shares: bool) -> None:
    with listener(0, shares=shares) as server:
        port = server.getsockname()[1]
        with (
            pytest.raises(StartupFailed, match=f"host, port: cannot listen on {HOST}:{port}"),
            reserved_port(HOST, port),
        ):
            pass


def test_a_server_that_does_not_share_cannot_take_a_reserved_port() -> None:
    with reserved_port(HOST, 0) as port, pytest.raises(OSError, match="in use"):
        listener(port, shares=False)


def test_a_host_that_is_none_is_told() -> None:
    with pytest.raises(StartupFailed, match="host, port"), reserved_port("256.0.0.1", 0):
        pass


def test_processes_share_port_and_secret_and_differ_in_name() -> None:
    of_processes = process_settings(make_settings(owner_id="c", port=1, health_port=2), 5000)
    assert [settings.owner_id for settings in of_processes] == ["c-0", "c-1", "c-2"]
    assert {settings.port for settings in of_processes} == {5000}
    assert {(settings.metrics_port, settings.health_port) for settings in of_processes} == {(None, None)}
    secrets = {settings.resume_secret.get_secret_value() for settings in of_processes if settings.resume_secret}
    assert len(secrets) == 1
    assert min(map(len, secrets)) >= 16


def test_a_configured_secret_reaches_every_process() -> None:
    secret = SecretStr("a secret of sixteen letters")
    assert {settings.resume_secret for settings in process_settings(make_settings(resume_secret=secret), 1)} == {secret}


def test_settings_reach_a_process_unchanged(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: []\n")
    for settings in process_settings(make_settings(api_keys_file=keys), 5000):
        assert CoordinatorSettings.model_validate(json.loads(as_json(settings.model_dump()))) == settings


async def test_a_process_that_has_ended_leaves_its_counters_and_not_its_gauges(tmp_path: Path) -> None:
    keys, metrics = tmp_path / "keys.yaml", tmp_path / "metrics"
    keys.write_text("keys: 7\n")
    metrics.mkdir()

    async def on_change() -> None: ...

    with reserved_port(HOST, 0) as port:
        settings = process_settings(make_settings(api_keys_file=keys), port)[0]
        assert await CoordinatorProcess(0, settings, str(metrics), on_change).live() == 1
    left = {path.name for path in metrics.iterdir()}
    assert "counter_0.db" in left
    assert {name for name in left if name.startswith("gauge")} == set()


async def test_a_process_that_the_system_does_not_start_has_ended_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def on_change() -> None:
        raise AssertionError("it never served")

    process = CoordinatorProcess(0, make_settings(), str(tmp_path), on_change)
    monkeypatch.setattr("sys.executable", str(tmp_path / "no such program"))
    assert await process.live() == 1
