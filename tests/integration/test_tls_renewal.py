"""A coordinator that outlives the certificate it shows to replicas: three real processes and real expiry."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from specdec.client import Client
from specdec.commands.up.cluster import free_port
from specdec.commands.up.service_process import ServiceProcess
from specdec.v1 import coordinator_pb2, coordinator_pb2_grpc
from tests.support.servers.certificates import Certificate, SecretVolume
from tests.support.services.faults import POLL_S, story
from tests.support.services.model_pair import ModelPair
from tests.support.services.one_service import running
from tests.support.services.secured import COORDINATOR, Secured, check_health, open_tls, replica_tls, secure

WAIT_S = 100.0
LIFETIME = timedelta(seconds=6)
# A certificate with less left is exchanged while the coordinator has yet to connect.
ENOUGH = timedelta(seconds=3)


async def wait_until(condition: Callable[[], Any], process: ServiceProcess) -> None:
    """Wait until a condition holds; the process must live."""
    ends_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends_s, process.last_log_lines()
        assert process.is_running, process.last_log_lines()
        await asyncio.sleep(POLL_S)


def log_of(process: ServiceProcess) -> str:
    return process.log_path.read_text(errors="replace") if process.log_path.exists() else ""


def events(process: ServiceProcess, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log_of(process).splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == name]


class ShortLived:
    """A volume with a client certificate that soon expires."""

    def __init__(self, secured: Secured, folder: Path) -> None:
        self._secured = secured
        self._authority = secured.authority.certificate
        self.volume = SecretVolume(folder, self._issue(LIFETIME), self._authority)
        self.expires = datetime.now(UTC) + LIFETIME

    def keep_valid(self) -> None:
        """Exchange the certificate for another short-lived one, if little time is left."""
        if self.expires - datetime.now(UTC) < ENOUGH:
            self.volume.write(self._issue(LIFETIME), self._authority)
            self.expires = datetime.now(UTC) + LIFETIME

    def spoil(self) -> None:
        """A certificate whose key is another's."""
        wrong = Certificate(self._issue(LIFETIME).key, self._issue(timedelta(hours=1)).chain)
        self.volume.write(wrong, self._authority)

    def renew(self) -> None:
        """A certificate for an hour."""
        self.volume.write(self._issue(timedelta(hours=1)), self._authority)

    def _issue(self, valid_for: timedelta) -> Certificate:
        return self._secured.authority.issue("coordinator", dns_names=[COORDINATOR], valid_for=valid_for)


def port_of(process: ServiceProcess) -> int:
    return int(process.spec.address.rpartition(":")[2])


async def wait_serving(target: ServiceProcess, secured: Secured) -> None:
    ends_s = time.monotonic() + WAIT_S
    status: int | None = None
    while status != health_pb2.HealthCheckResponse.SERVING:
        assert time.monotonic() < ends_s, target.last_log_lines()
        assert target.is_running, target.last_log_lines()
        async with open_tls(port_of(target), secured.credentials()) as channel:
            with suppress(grpc.aio.AioRpcError):
                status = await check_health(channel)
        await asyncio.sleep(POLL_S)  # a handshake after the other would take the core that the target loads on


async def state_of_target(coordinator: ServiceProcess) -> str:
    async with grpc.aio.insecure_channel(coordinator.spec.address) as channel:
        stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        status = await stub.GetStatus(coordinator_pb2.GetStatusRequest(), timeout=WAIT_S, wait_for_ready=True)
    return next(replica.state for replica in status.replicas if replica.role == "target")


async def wait_ready(coordinator: ServiceProcess, meanwhile: Callable[[], None] = lambda: None) -> None:
    ends_s = time.monotonic() + WAIT_S
    while await state_of_target(coordinator) != "ready":
        assert time.monotonic() < ends_s, coordinator.last_log_lines()
        meanwhile()
        await asyncio.sleep(POLL_S)


@pytest.mark.timeout(300)  # the target starts twice
async def test_a_coordinator_whose_certificate_has_expired_reconnects_with_the_renewed_one(
    tiny_pair: ModelPair, tmp_path: Path
) -> None:
    secured = secure(tmp_path / "target")
    shown = ShortLived(secured, tmp_path / "coordinator")
    of_target = {
        "model": tiny_pair.target,
        "tls_dir": secured.volume.folder,
        "tls_verify_clients": True,
        "tls_allowed_client_names": COORDINATOR,
    }
    async with running("target", of_target, tmp_path) as target:
        await wait_serving(target, secured)
        # The draft is nowhere: its link asks for the files again and again, too.
        addresses = {"targets": target.spec.address, "drafts": f"127.0.0.1:{free_port()}"}
        shown.keep_valid()
        async with running("coordinator", {**addresses, **replica_tls(shown.volume)}, tmp_path) as coordinator:
            await wait_ready(coordinator, shown.keep_valid)
            async with Client(coordinator.spec.address) as client:
                before = await client.complete(story())
                target.kill()
                await wait_until(lambda: datetime.now(UTC) > shown.expires, coordinator)
                target.start()
                await wait_serving(target, secured)
                await wait_until(lambda: "certificate has expired" in log_of(target), target)
                assert await state_of_target(coordinator) == "down"

                shown.spoil()
                await wait_until(lambda: events(coordinator, "tls_files_refused"), coordinator)
                refusals = log_of(target).count("certificate has expired")
                await wait_until(lambda: log_of(target).count("certificate has expired") > refusals, target)
                (refused,) = events(coordinator, "tls_files_refused")
                assert refused["reason"].startswith("replica_tls_dir: tls.crt, tls.key in ")

                shown.renew()
                await wait_ready(coordinator)
                assert (await client.complete(story())).choices[0].token_ids == before.choices[0].token_ids
