"""Transport security of the whole system: mutual TLS on every hop of three real services with a model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2

from specdec.client import Client, ClientSettings, Completion
from specdec.commands.up.cluster import Cluster, RoleSettings, free_port, service_spec
from specdec.commands.up.plan import LocalPlan, plan_services
from specdec.commands.up.service_process import ServiceProcess
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2, coordinator_pb2_grpc
from specdec.wire.errors import PermissionDenied, Unavailable
from tests.support.servers.certificates import Authority, Certificate, SecretVolume
from tests.support.services.clusters import TIMEOUTS, TINY_HOLD_OFF_MS
from tests.support.services.faults import speculated, story
from tests.support.services.model_pair import ModelPair
from tests.support.services.reflection import reflect
from tests.support.services.secured import (
    CALL_TIMEOUT_S,
    CLIENT,
    COORDINATOR,
    Secured,
    check_health,
    error_of,
    open_tls,
    replica_tls,
    secure,
    served_serial,
)

WAIT_S = 60.0
DRAFT = "draft.specdec"
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@pytest.fixture
def secured(tmp_path: Path) -> Secured:
    return secure(tmp_path / "secret")


@dataclass(frozen=True, slots=True)
class SecureCluster:
    """Three services with mutual TLS on every hop, and their ports by role."""

    cluster: Cluster
    secured: Secured
    volumes: dict[str, SecretVolume]
    health_ports: dict[str, int]
    metrics_ports: dict[str, int]

    def client(self, client: Certificate | None = None) -> Client:
        shown = client or self.secured.client
        settings = ClientSettings(
            root_certificates=self.secured.authority.certificate, client_certificate=(shown.key, shown.chain)
        )
        return Client(self.cluster.address, settings)

    def port(self, role: str) -> int:
        return int(self.cluster.services[role].spec.address.rpartition(":")[2])


@pytest.fixture(scope="module")
def secure_cluster(tiny_pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureCluster]:
    """Each service has its own certificate; the coordinator shows its own to replicas, which admit no other."""
    folder = tmp_path_factory.mktemp("secure_cluster")
    secured = secure(folder / "unused")
    volumes, settings, health_ports, metrics_ports = {}, {}, {}, {}
    for role in ("target", "draft", "coordinator"):
        certificate = secured.authority.issue(role, dns_names=[f"{role}.specdec"])
        volume = volumes[role] = SecretVolume(folder / role, certificate, secured.authority.certificate)
        health_ports[role], metrics_ports[role] = free_port(), free_port()
        settings[role] = {
            "tls_dir": volume.folder,
            "tls_verify_clients": True,
            "tls_allowed_client_names": CLIENT if role == "coordinator" else COORDINATOR,
            "health_port": health_ports[role],
            "metrics_port": metrics_ports[role],
            "metrics_tls": True,
            "reflection": False,
        }
    plan = LocalPlan(
        target_model=str(tiny_pair.target),
        draft_model=str(tiny_pair.draft),
        device="cpu",
        free_ports=True,
        target_settings={**settings["target"], "hold_off_ms": TINY_HOLD_OFF_MS, "tls_draft_names": DRAFT},
        draft_settings={**settings["draft"], **replica_tls(volumes["draft"])},
        coordinator_settings={**settings["coordinator"], **replica_tls(volumes["coordinator"])},
    )
    services = plan_services(plan, environment={})
    cluster = Cluster(services, log_dir=folder, timeouts=TIMEOUTS, credentials=secured.credentials())
    with cluster:
        cluster.start()
        yield SecureCluster(cluster, secured, volumes, health_ports, metrics_ports)


@pytest.mark.smoke
async def test_a_generation_with_mutual_tls_on_every_hop_speculates(secure_cluster: SecureCluster) -> None:
    async with secure_cluster.client() as client:
        completion = await speculated(client, story())
    assert completion.num_tokens == 32


async def test_callers_with_a_wrong_name_are_refused_by_every_service(secure_cluster: SecureCluster) -> None:
    stranger = secure_cluster.secured.authority.issue("stranger", dns_names=["stranger.specdec"])
    async with secure_cluster.client(stranger) as client:
        with pytest.raises(PermissionDenied, match=r"stranger\.specdec"):
            await client.complete(story())
    # What may call the coordinator may not call a replica.
    for role in ("target", "draft"):
        async with open_tls(secure_cluster.port(role), secure_cluster.secured.credentials()) as channel:
            call: Any = channel.unary_unary(f"/specdec.v1.{role.capitalize()}Service/GetReplicaInfo")
            assert isinstance(await error_of(call(b"", timeout=CALL_TIMEOUT_S)), PermissionDenied)


async def test_a_draft_may_join_sessions_at_a_target_and_open_none(secure_cluster: SecureCluster) -> None:
    async with secure_cluster.client() as client:
        await speculated(client, story())
        links = [link for replica in (await client.status()).replicas for link in replica.links]
    assert [link.is_direct for link in links] == [True], links
    draft = secure_cluster.secured.authority.issue("draft", dns_names=[DRAFT])
    credentials = grpc.ssl_channel_credentials(secure_cluster.secured.authority.certificate, draft.key, draft.chain)
    async with open_tls(secure_cluster.port("target"), credentials) as channel:
        for method, is_allowed in {"GetReplicaInfo": True, "SetDrafters": False}.items():
            call: Any = channel.unary_unary(f"/specdec.v1.TargetService/{method}")
            if is_allowed:
                assert await call(b"", timeout=CALL_TIMEOUT_S)
            else:
                assert isinstance(await error_of(call(b"", timeout=CALL_TIMEOUT_S)), PermissionDenied)
        for method, is_allowed in {"Link": True, "Verify": False}.items():
            stream: Any = channel.stream_stream(f"/specdec.v1.TargetService/{method}")()
            if is_allowed:
                assert pb.LinkFrame.FromString(await stream.read()).HasField("hello")
                stream.cancel()
            else:
                assert isinstance(await error_of(stream.read()), PermissionDenied)


async def test_certificates_renewed_in_mid_stream_disturb_no_stream(
    secure_cluster: SecureCluster, tmp_path: Path
) -> None:
    authority = secure_cluster.secured.authority
    context = secure_cluster.secured.ssl_context(tmp_path)
    async with secure_cluster.client() as client:
        expected = await client.complete(story(max_tokens=200))
        streamed = Completion()
        async for chunk in client.generate(story(max_tokens=200)):
            streamed.add(chunk)
            if chunk.WhichOneof("chunk") != "started":
                continue
            for role, volume in secure_cluster.volumes.items():
                renewed = authority.issue(role, dns_names=[f"{role}.specdec"])
                volume.write(renewed, authority.certificate)
                assert await served_serial(secure_cluster.port(role), context) == renewed.serial_number
        assert streamed.num_tokens == 200
        assert streamed.identity == expected.identity
    async with secure_cluster.client() as client:
        again = await client.complete(story(max_tokens=200))
        assert again.identity == expected.identity


async def test_nothing_listens_unencrypted_but_the_health_port(secure_cluster: SecureCluster, tmp_path: Path) -> None:
    secured = secure_cluster.secured
    context = secured.ssl_context(tmp_path)
    for role, service in secure_cluster.cluster.services.items():
        assert service.pid is not None
        grpc_port, metrics_port = secure_cluster.port(role), secure_cluster.metrics_ports[role]
        health_port = secure_cluster.health_ports[role]
        assert listening_ports(service.pid) == {grpc_port, metrics_port, health_port}
        for port in (grpc_port, metrics_port, health_port):
            async with (
                grpc.aio.insecure_channel(f"127.0.0.1:{port}") as plain,
                open_tls(port, secured.credentials()) as encrypted,
            ):
                if port == health_port:
                    assert await check_health(plain) == health_pb2.HealthCheckResponse.SERVING
                    assert type(await error_of(check_health(encrypted))) is Unavailable
                    assert await speaks_plain_http2(port)
                    continue
                assert type(await error_of(check_health(plain))) is Unavailable
                assert not await speaks_plain_http2(port)
                assert await served_serial(port, context)
                if port == grpc_port:
                    assert await check_health(encrypted) == health_pb2.HealthCheckResponse.SERVING
        # And the health port serves nothing else.
        async with grpc.aio.insecure_channel(f"127.0.0.1:{health_port}") as plain:
            method = "GetModelInfo" if role == "coordinator" else "GetReplicaInfo"
            call: Any = plain.unary_unary(f"/specdec.v1.{role.capitalize()}Service/{method}")
            for refused in (call(b"", timeout=CALL_TIMEOUT_S), reflect(plain).read()):
                assert (await error_of(refused)).code is grpc.StatusCode.UNIMPLEMENTED


def listening_ports(pid: int) -> set[int]:
    """TCP ports on which a process or one of its children listens."""
    process = psutil.Process(pid)
    return {
        connection.laddr.port
        for member in (process, *process.children(recursive=True))
        for connection in member.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }


async def speaks_plain_http2(port: int) -> bool:
    """Whether the port answers an HTTP/2 preface with SETTINGS."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(HTTP2_PREFACE)
        header = await asyncio.wait_for(reader.readexactly(9), CALL_TIMEOUT_S)
        return header[3] == 4
    except (asyncio.IncompleteReadError, ConnectionError):
        return False
    finally:
        writer.transport.abort()


async def test_reflection_is_off_where_it_is_switched_off(secure_cluster: SecureCluster) -> None:
    replica_caller = secure_cluster.secured.authority.issue("x", dns_names=[COORDINATOR])
    for role in secure_cluster.volumes:
        caller = secure_cluster.secured.client if role == "coordinator" else replica_caller
        async with open_tls(secure_cluster.port(role), secure_cluster.secured.credentials(caller)) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await reflect(channel).read()
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_coordinator_that_trusts_another_authority_sees_replicas_down_and_why(
    secure_cluster: SecureCluster, tmp_path: Path
) -> None:
    volume = SecretVolume(
        tmp_path / "wrong", secure_cluster.secured.authority.issue(COORDINATOR), Authority("another").certificate
    )
    addresses = {role: secure_cluster.cluster.services[role].spec.address for role in ("target", "draft")}
    settings = RoleSettings(
        overrides={
            "targets": addresses["target"],
            "drafts": addresses["draft"],
            "metrics_port": None,
            **replica_tls(volume),
        }
    )
    spec = service_spec("coordinator", "coordinator", free_port(), settings, environment={})
    service = ServiceProcess(spec, tmp_path / "coordinator.log")
    service.start()
    try:
        replicas = await wait_down(service)
    finally:
        service.kill()
    assert {replica.role for replica in replicas} == {"target", "draft"}
    for replica in replicas:
        assert replica.address in replica.detail
        assert "CERTIFICATE_VERIFY_FAILED" in replica.detail


def test_a_coordinator_with_an_unusable_client_certificate_exits_and_names_the_setting(
    secured: Secured, tmp_path: Path
) -> None:
    not_a_pair = Certificate(secured.client.key, secured.authority.issue("x").chain)
    folder = secured.volume.folder
    cases = [
        (b"garbage", f"replica_tls_dir: ca.crt in {folder}: not usable PEM"),
        (secured.authority.certificate, f"replica_tls_dir: tls.crt, tls.key in {folder}: the key does not belong"),
    ]
    for authority, reason in cases:
        secured.volume.write(not_a_pair, authority)
        overrides = {"targets": "127.0.0.1:1", "metrics_port": None, **replica_tls(secured.volume)}
        spec = service_spec(
            "coordinator", "coordinator", free_port(), RoleSettings(overrides=overrides), environment={}
        )
        service = ServiceProcess(spec, tmp_path / "coordinator.log")
        service.start()
        try:
            assert service.wait(WAIT_S)
        finally:
            service.kill()
        assert service.exit_code == 1
        assert any("startup_failed" in line and reason in line for line in service.last_log_lines())


async def wait_down(service: ServiceProcess) -> list[coordinator_pb2.ReplicaStatus]:
    """What a coordinator says of its replicas once all of them are down and none is being tried for the first time."""
    deadline_s = time.monotonic() + WAIT_S
    async with grpc.aio.insecure_channel(service.spec.address) as channel:
        stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        while time.monotonic() < deadline_s:
            request = coordinator_pb2.GetStatusRequest()
            status = await stub.GetStatus(request, timeout=WAIT_S, wait_for_ready=True)
            replicas = list(status.replicas)
            if replicas and all(replica.state == "down" for replica in replicas):
                return replicas
            assert not await asyncio.to_thread(service.wait, 0.1), service.last_log_lines()
    raise AssertionError(f"not all down: {replicas}")
