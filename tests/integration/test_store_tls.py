"""TLS to a real Redis whose certificates are renewed: a single server, a cluster, and sentinels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from specdec.store.interface import StoreUnavailable, StoreUrlError
from specdec.store.urls import RedisOptions, connect
from tests.support.servers.certificates import Authority, Certificate, SecretVolume
from tests.support.servers.redis_server import RedisServer, redis_cluster, redis_sentinel
from tests.support.servers.store_use import connected, until_up, use


@pytest.fixture
def authority() -> Authority:
    return Authority("right")


@pytest.fixture
def of_server(tmp_path: Path, authority: Authority) -> SecretVolume:
    return SecretVolume(tmp_path / "server", authority.issue("redis"), authority.certificate)


@pytest.fixture
def of_client(tmp_path: Path, authority: Authority) -> SecretVolume:
    return SecretVolume(tmp_path / "client", authority.issue("coordinator"), authority.certificate)


def options(volume: SecretVolume) -> RedisOptions:
    return RedisOptions(tls=volume.paths(), timeout_s=20)


def drop_connections(server: RedisServer) -> None:
    with server.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)


def refusals(log: list[Any]) -> list[str]:
    return [entry["reason"] for entry in log if entry["event"] == "tls_files_refused"]


async def test_a_renewed_client_certificate_is_shown_when_redis_no_longer_takes_the_old_one(
    tmp_path: Path, of_server: SecretVolume, of_client: SecretVolume
) -> None:
    with RedisServer(tmp_path, tls=of_server) as server:
        async with connected(server.url, options(of_client)) as store:
            await use(store)
            latest = Authority("latest")
            server.stop()
            of_server.write(latest.issue("redis"), latest.certificate)
            server.start()
            for _ in range(2):
                with pytest.raises(StoreUnavailable):
                    await store.ping()
            of_client.write(latest.issue("coordinator"), latest.certificate)
            await use(store)


async def test_broken_new_files_are_logged_once_and_the_old_ones_connect(
    tmp_path: Path, of_server: SecretVolume, of_client: SecretVolume, authority: Authority
) -> None:
    with RedisServer(tmp_path, tls=of_server) as server, structlog.testing.capture_logs() as log:
        async with connected(server.url, options(of_client)) as store:
            await use(store)
            of_client.write(
                Certificate(authority.issue("x").key, authority.issue("coordinator").chain), authority.certificate
            )
            for _ in range(3):
                drop_connections(server)
                await until_up(store)
    assert refusals(log) == [
        f"redis_tls_dir: tls.crt, tls.key in {of_client.folder}: the key does not belong to the certificate"
    ]


async def test_no_authority_is_trusted_beside_those_of_the_file(
    tmp_path: Path,
    of_server: SecretVolume,
    of_client: SecretVolume,
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = Authority("of the system")
    with RedisServer(tmp_path, tls=of_server) as server:
        monkeypatch.setenv("SSL_CERT_FILE", str(of_server.authority))
        no_file = RedisOptions(tls=replace(of_client.paths(), authorities=None), timeout_s=20)
        async with connected(server.url, no_file) as store:
            await store.ping()
        of_client.write(authority.issue("coordinator"), other.certificate)
        async with connected(server.url, options(of_client)) as store:
            with pytest.raises(StoreUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
                await store.ping()


async def test_a_cluster_is_reached_with_tls(tmp_path: Path, of_server: SecretVolume, of_client: SecretVolume) -> None:
    with redis_cluster(tmp_path, tls=of_server) as cluster:
        async with connected(cluster.url, options(of_client)) as store:
            await use(store)
            # Each node is connected to anew, and found by asking the others.
            for node in cluster.masters:
                drop_connections(node)
            await until_up(store)
            for number in range(20):
                await store.take_tokens(f"tenant {number}", 1, 1, 10)


async def test_sentinels_and_the_master_they_name_are_reached_with_tls(
    tmp_path: Path, of_server: SecretVolume, of_client: SecretVolume, authority: Authority
) -> None:
    with redis_sentinel(tmp_path, tls=of_server) as setup:
        async with connected(setup.url, options(of_client)) as store:
            await use(store)
        stranger = Authority("wrong")
        of_client.write(stranger.issue("coordinator"), authority.certificate)
        async with connected(setup.url, options(of_client)) as store:
            with pytest.raises(StoreUnavailable):
                await store.ping()


def test_files_that_cannot_be_used_are_told_before_redis_is_asked(
    of_client: SecretVolume, authority: Authority
) -> None:
    of_client.write(authority.issue("coordinator"), b"garbage")
    with pytest.raises(StoreUrlError, match=r"redis_tls_dir: ca\.crt in .*: not usable PEM"):
        connect("rediss://127.0.0.1:1", options(of_client))
    of_client.write(Certificate(authority.issue("x").key, authority.issue("y").chain), authority.certificate)
    with pytest.raises(StoreUrlError, match=r"redis_tls_dir: tls\.crt, tls\.key in .*: the key does not belong"):
        connect("rediss://127.0.0.1:1", options(of_client))
