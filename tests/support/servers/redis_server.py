"""Real Redis servers on loopback: single ones, a cluster, and a sentinel with its master and replica."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from specdec.commands.up.cluster import free_port
from tests.support.servers.certificates import SecretVolume

START_S = 30.0
POLL_S = 0.01
NUM_SLOTS = 16384
SERVICE = "main"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds; a Redis that cannot be reached does not meet it."""
    ends_s = time.monotonic() + START_S
    while True:
        try:
            if condition():
                return
        except (redis.ConnectionError, redis.TimeoutError):
            pass
        assert time.monotonic() < ends_s, f"not within {START_S:g} s: {what}"
        time.sleep(POLL_S)


class RedisServer:
    """A redis-server that can be stopped and restarted on its port; a restart loses its data."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        tls: SecretVolume | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare a server with its files in `folder`; with `tls` it speaks only TLS and requires certificates.

        `environment` has variables beyond this process's own.
        """
        self.port = free_port()
        self._environment = {**os.environ, **(environment or {})}
        self._tls = tls
        self._command = ["--bind", "127.0.0.1", "--dir", str(folder), "--save", "", "--appendonly", "no"]
        if tls is None:
            self._command += ["--port", str(self.port)]
        else:
            self._command += ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "yes"]
            self._command += ["--tls-cert-file", str(tls.certificate), "--tls-key-file", str(tls.key)]
            self._command += ["--tls-ca-cert-file", str(tls.authority)]
        self._command += arguments
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        scheme = "redis" if self._tls is None else "rediss"
        return f"{scheme}://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it answers, which may be that it needs a password."""
        program = shutil.which("redis-server")
        assert program is not None, "redis-server is missing: run `make servers`"
        process = self._process = subprocess.Popen(
            [program, *self._command], stdout=subprocess.DEVNULL, env=self._environment
        )

        def answers() -> bool:
            assert process.poll() is None, f"redis-server ended with {process.returncode}"
            try:
                with self.client() as client:
                    return bool(client.ping())
            except redis.AuthenticationError:
                return True

        wait_until(answers, "Redis answers")

    def stop(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Make it hang, with its connections open."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """End a pause."""
        self._signal(signal.SIGCONT)

    def client(self, **arguments: Any) -> redis.Redis:
        """A client for the test itself."""
        if self._tls is not None:
            arguments |= {"ssl": True, "ssl_ca_certs": str(self._tls.authority)}
            arguments |= {"ssl_certfile": str(self._tls.certificate), "ssl_keyfile": str(self._tls.key)}
        return redis.Redis(host="127.0.0.1", port=self.port, retry=Retry(NoBackoff(), 0), **arguments)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)


def redis_client(volume: SecretVolume) -> dict[str, object]:
    """Settings of a service that uses this volume's certificate at Redis."""
    return {"redis_tls_dir": volume.folder}


class RedisCluster:
    """Three masters with a third of the slots each; the first has a replica."""

    def __init__(self, masters: list[RedisServer], replica: RedisServer) -> None:
        self.masters = masters
        self.replica = replica

    @property
    def url(self) -> str:
        scheme = self.replica.url.partition(":")[0]
        return f"{scheme}+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in [*self.masters, self.replica])

    def promote_replica(self) -> None:
        """Promote the replica, as a cluster does after the loss of the first master."""
        with self.replica.client() as client:
            client.execute_command("CLUSTER", "FAILOVER", "TAKEOVER")
            wait_until(lambda: client.role()[0] == b"master", "the replica is promoted")


@contextmanager
def redis_cluster(folder: Path, tls: SecretVolume | None = None) -> Iterator[RedisCluster]:
    """A cluster whose nodes agree on the owners of all slots. It fails over only by `promote_replica`."""
    with ExitStack() as stack:
        nodes = []
        bus_ports = []
        for number in range(4):
            bus_ports.append(free_port())
            arguments = ["--cluster-enabled", "yes", "--cluster-announce-ip", "127.0.0.1"]
            arguments += ["--cluster-port", str(bus_ports[-1]), "--cluster-config-file", f"nodes-{number}.conf"]
            # No automatic fail-over, which a slow machine might trigger.
            arguments += ["--cluster-node-timeout", "60000", "--repl-diskless-sync-delay", "0"]
            if tls is not None:
                arguments += ["--tls-cluster", "yes", "--tls-replication", "yes"]
            nodes.append(stack.enter_context(RedisServer(folder, *arguments, tls=tls)))
        *masters, replica = nodes
        clients = [stack.enter_context(node.client()) for node in nodes]
        for number, client in enumerate(clients[:-1]):
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            first, end = (NUM_SLOTS * part // len(masters) for part in (number, number + 1))
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
        for node, bus_port in zip(nodes[1:], bus_ports[1:], strict=True):
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, bus_port)

        def knows_all(client: redis.Redis) -> bool:
            info = client.execute_command("CLUSTER INFO")
            return info["cluster_state"] == "ok" and info["cluster_known_nodes"] == str(len(nodes))

        wait_until(lambda: all(map(knows_all, clients)), "the cluster is formed")
        clients[-1].execute_command("CLUSTER", "REPLICATE", clients[0].execute_command("CLUSTER", "MYID"))
        wait_until(lambda: clients[-1].info("replication").get("master_link_status") == "up", "the replica follows")
        yield RedisCluster(masters, replica)


class SentinelSetup:
    """A master, its replica, and the sentinel that watches them."""

    def __init__(self, servers: list[RedisServer], sentinel: RedisServer) -> None:
        self.servers = servers
        self.sentinel = sentinel

    @property
    def url(self) -> str:
        scheme = self.sentinel.url.partition(":")[0]
        return f"{scheme}+sentinel://127.0.0.1:{self.sentinel.port}/{SERVICE}"

    def master(self) -> RedisServer:
        """The sentinel's present master."""
        with self.sentinel.client() as client:
            _, port = client.sentinel_get_master_addr_by_name(SERVICE)
        return next(server for server in self.servers if server.port == port)

    def fail_over(self) -> None:
        """Let the sentinel promote the replica, as it does after the loss of the master."""
        with self.sentinel.client() as client:
            client.execute_command("SENTINEL", "FAILOVER", SERVICE)


@contextmanager
def redis_sentinel(
    folder: Path, tls: SecretVolume | None = None, *, down_after_ms: int = 600_000
) -> Iterator[SentinelSetup]:
    """A sentinel that fails over by `fail_over`, and by itself only for a master that is silent for `down_after_ms`:
    long, because a slow machine might trigger it."""
    with ExitStack() as stack:
        shared = [] if tls is None else ["--tls-replication", "yes"]
        master = stack.enter_context(RedisServer(folder, "--repl-diskless-sync-delay", "0", *shared, tls=tls))
        following = ["--replicaof", "127.0.0.1", str(master.port)]
        replica = stack.enter_context(RedisServer(folder, *following, *shared, tls=tls))
        with replica.client() as client:
            wait_until(lambda: client.info("replication")["master_link_status"] == "up", "the replica follows")
        config = folder / "sentinel.conf"
        config.write_text(
            f"sentinel monitor {SERVICE} 127.0.0.1 {master.port} 1\n"
            f"sentinel down-after-milliseconds {SERVICE} {down_after_ms}\n"
            f"sentinel failover-timeout {SERVICE} 10000\n"
        )
        sentinel = stack.enter_context(SentinelServer(folder, config, tls))
        with sentinel.client() as client:
            wait_until(lambda: client.sentinel_master(SERVICE)["num-slaves"] == 1, "the sentinel knows the replica")
        yield SentinelSetup([master, replica], sentinel)


class SentinelServer(RedisServer):
    """A redis-server that is a sentinel."""

    def __init__(self, folder: Path, config: Path, tls: SecretVolume | None) -> None:
        shared = [] if tls is None else ["--tls-replication", "yes"]
        super().__init__(folder, *shared, tls=tls)
        persistence = self._command.index("--save")
        # The configuration file comes first, and a sentinel has no options of persistence.
        del self._command[persistence : persistence + 4]
        self._command = [str(config), "--sentinel", *self._command]
