"""How the store's Redis is reached: passwords, users, TLS, and clusters and sentinels that fail over."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from specdec.store.guarded import GuardedStore
from specdec.store.interface import StoreUnavailable, StoreUrlError
from specdec.store.urls import RedisOptions, connect
from specdec.wire.backoff import Backoff
from specdec.wire.tls_files import TlsFile
from tests.support.servers.certificates import Authority, SecretVolume
from tests.support.servers.redis_server import RedisServer, redis_cluster, redis_sentinel, wait_until
from tests.support.servers.store_use import LONG_S, PATIENT, connected, until_up, use
from tests.support.services.faults import eventually

DOCUMENT = Path(__file__).parents[2] / "docs" / "redis.md"


def allow(server: RedisServer, *more: str) -> RedisOptions:
    """Add a user with the rights that the documentation gives, and none else; returns how to be it."""
    rules = DOCUMENT.read_text().partition("ACL SETUSER specdec on >PASSWORD ")[2].partition("\n\n")[0].split()
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "specdec", "on", ">secret@1", *rules, *more)
    return RedisOptions(username="specdec", password=SecretStr("secret@1"), timeout_s=20)


async def test_a_user_needs_no_more_rights_than_documented(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        options = allow(server)
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "default", "off")
        async with connected(server.url.replace("//", "//specdec:secret%401@")) as in_url:
            await use(in_url)
        async with connected(server.url.replace("//", "//other:wrong@"), options) as in_options:
            await use(in_options)


@pytest.mark.parametrize("credentials", ["specdec:hunter2", ":hunter2", "hunter2:secret", ""])
async def test_wrong_credentials_are_unavailable_and_never_shown(tmp_path: Path, credentials: str) -> None:
    with RedisServer(tmp_path, "--requirepass", "secret") as server:
        url = server.url.replace("//", f"//{credentials}@" if credentials else "//")
        with capture_logs() as log:
            guarded = GuardedStore(connect(url, PATIENT))
            with pytest.raises(StoreUnavailable) as failure:
                await guarded.ping()
            await guarded.close()
        assert [entry["event"] for entry in log] == ["store_down"]
        assert "Authentication" in str(failure.value)
        for text in (str(failure.value), str(log)):
            assert "hunter2" not in text
            assert "secret" not in text


async def test_tls_needs_the_right_authority_and_a_client_certificate(tmp_path: Path) -> None:
    authority, stranger = Authority("right"), Authority("wrong")
    ours = SecretVolume(tmp_path / "ours", authority.issue("redis"), authority.certificate)
    theirs = SecretVolume(tmp_path / "theirs", stranger.issue("client"), stranger.certificate)
    with RedisServer(tmp_path, tls=ours) as server:

        def options(**changes: TlsFile | None) -> RedisOptions:
            return RedisOptions(tls=replace(ours.paths(), **changes), timeout_s=20)

        async with connected(server.url, options()) as store:
            await use(store)
        other = theirs.paths()
        for wrong in (
            options(authorities=other.authorities),
            options(authorities=None),
            options(certificate=other.certificate, key=other.key),
            options(certificate=None, key=None),
        ):
            async with connected(server.url, wrong) as store:
                with pytest.raises(StoreUnavailable):
                    await store.ping()
        async with connected(server.url.replace("rediss:", "redis:"), PATIENT) as plain:
            with pytest.raises(StoreUnavailable):
                await plain.ping()


async def test_a_certificate_for_another_host_is_refused(tmp_path: Path) -> None:
    authority = Authority("right")
    ours = SecretVolume(tmp_path / "ours", authority.issue("redis"), authority.certificate)
    options = RedisOptions(tls=ours.paths(), timeout_s=20)
    with RedisServer(tmp_path, tls=ours) as server:
        # The certificate is for the address, not for the name.
        async with connected(server.url.replace("127.0.0.1", "localhost"), options) as store:
            with pytest.raises(StoreUnavailable):
                await store.ping()


async def test_a_server_that_lost_its_scripts_is_taught_them_again(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        async with connected(server.url) as store:
            await use(store)
            with server.client() as client:
                client.script_flush()
            await use(store)
            digests = [bytes([number]) for number in range(100)]
            with server.client() as client:
                client.script_flush()
            await store.add_prefixes("a:1", digests, LONG_S)
            assert await store.prefix_holders(digests) == [frozenset({"a:1"})] * 100


async def test_a_cluster_goes_on_when_a_replica_takes_a_masters_place(tmp_path: Path) -> None:
    digests = [bytes([number]) for number in range(100)]
    with redis_cluster(tmp_path) as cluster:
        async with connected(cluster.url) as store:
            await use(store)
            await store.add_prefixes("a:1", digests, LONG_S)
            with cluster.masters[0].client() as client:
                assert client.wait(1, 20_000) == 1
            cluster.masters[0].stop()
            with pytest.raises(StoreUnavailable):
                await store.prefix_holders(digests)
            cluster.promote_replica()

            async def has_healed() -> bool:
                try:
                    return await store.prefix_holders(digests) == [frozenset({"a:1"})] * 100
                except StoreUnavailable:
                    return False

            await eventually(has_healed, "the replica is asked")
            for number in range(20):
                await store.take_tokens(f"tenant {number}", 1, 1, 10)


async def test_a_cluster_that_moved_slots_is_followed_without_an_error(tmp_path: Path) -> None:
    tenants = [f"tenant {number}" for number in range(30)]
    with redis_cluster(tmp_path) as cluster:
        # In passing: what a user needs on a cluster.
        for node in [*cluster.masters, cluster.replica]:
            options = allow(node, "+cluster|slots", "+command")
        async with connected(cluster.url, options) as store:
            await use(store)
            for tenant in tenants:
                assert await store.take_tokens(tenant, 10, 1e-6, 10) == 0
            with cluster.masters[0].client() as client:
                assert client.wait(1, 20_000) == 1
                cluster.promote_replica()
                wait_until(lambda: client.role()[0] == b"slave", "the former master knows that it is none")
            for tenant in tenants:
                assert await store.take_tokens(tenant, 10, 1e-6, 10) > 0


async def test_sentinels_lead_to_the_promoted_replica(tmp_path: Path) -> None:
    with redis_sentinel(tmp_path) as setup, RedisServer(tmp_path) as hanging:
        # A sentinel that hangs comes first, and does not use up the time of the others.
        url = setup.url.replace("127.0.0.1:", f"127.0.0.1:{hanging.port},127.0.0.1:", 1)
        hanging.pause()
        guarded = GuardedStore(connect(url, RedisOptions(timeout_s=6)), backoff=Backoff(0.05, 0.2))
        await until_up(guarded)
        await guarded.add_prefixes("a:1", [b"digest"], LONG_S)
        master = setup.master()
        with master.client() as client:
            assert client.wait(1, 20_000) == 1
        master.stop()
        with pytest.raises(StoreUnavailable):
            await guarded.ping()
        setup.fail_over()
        await until_up(guarded)
        assert setup.master() is not master
        assert await guarded.prefix_holders([b"digest"]) == [frozenset({"a:1"})]
        await use(guarded)
        await guarded.close()


class MovingAddress:
    """An address that leads to another server from some moment on, as a Service's or a name does after a fail-over.

    Connections that are open stay where they are.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        """Where new connections lead."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection."""
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.port)
        for source, sink in ((reader, up_writer), (up_reader, writer)):
            task = asyncio.create_task(_relay(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _relay(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await source.read(65536):
            sink.write(data)
    sink.close()


async def test_after_a_fail_over_behind_one_address_the_former_master_is_left(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as former, RedisServer(tmp_path) as latter:
        address = MovingAddress(former.port)
        listener = await asyncio.start_server(address.accept, "127.0.0.1", 0)
        url = f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        guarded = GuardedStore(connect(url, PATIENT), backoff=Backoff(0.05, 0.2))
        await use(guarded)
        address.port = latter.port
        with former.client() as client:
            client.execute_command("REPLICAOF", "127.0.0.1", latter.port)

        async def is_written() -> bool:
            with contextlib.suppress(StoreUnavailable):
                await guarded.add_prefixes("a:1", [b"digest"], LONG_S)
                return True
            return False

        await eventually(is_written, "the new master takes what is written")
        with latter.client() as client:
            assert len(list(client.scan_iter("*:prefix:*"))) == 1
        await use(guarded)
        await guarded.close()
        listener.close()


@pytest.mark.parametrize(
    "url",
    [
        "http://u:hunter2@h",
        "redis://u:hunter2@h:x",
        "redis://u:hunter2@",
        "redis://u:hunter2@h/name",
        "redis://u:hunter2@h,i",
        "redis+sentinel://u:hunter2@h",
        "redis+cluster://u:hunter2@h/1",
        "redis://u:hunter2@[h",
        "redis://u:hunter2@h?x=1",
        "redis:u:hunter2@h",
    ],
)
def test_a_wrong_url_names_the_setting_and_hides_the_password(url: str) -> None:
    with pytest.raises(StoreUrlError, match="redis_url") as error:
        connect(url)
    assert "hunter2" not in str(error.value)
