"""The services as processes on loopback."""

from __future__ import annotations

import contextlib
import http
import http.client
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.commands.errors import ClusterFailed
from specdec.commands.up.service_process import MODULES, ServiceProcess, ServiceSpec
from specdec.v1 import coordinator_pb2, coordinator_pb2_grpc

HOST = "127.0.0.1"
POLL_S = 0.1
_PROBE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTimeouts:
    """Times in seconds."""

    start_s: float = 600.0
    """Until a service is healthy; in a checkout the first start compiles kernels."""
    connect_s: float = 30.0
    """Until the coordinator has connected to every replica."""
    stop_s: float = 15.0
    """From SIGTERM until a service that still runs is killed."""
    patience_s: float = 5.0
    """Until a wait for a service also reports the last line of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSettings:
    """Values by name of the setting, for all replicas of a role."""

    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values that SPECDEC_<ROLE>_* in the environment replace."""
    overrides: Mapping[str, object] = field(default_factory=dict)
    """Values that win over the environment."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Values that no override may name."""


def free_port() -> int:
    """Return a free TCP port of loopback; for a minute the kernel gives it to no process that asks for any port.

    A closed connection in TIME_WAIT reserves it. Servers can listen there, because they set SO_REUSEADDR or
    SO_REUSEPORT.
    """
    with socket.socket() as server:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # A later listener may share only if this one does.
            server.setsockopt(socket.SOL_SOCKET, option, 1)
        server.bind((HOST, 0))
        server.listen()
        with socket.create_connection(server.getsockname()) as client:
            accepted, _ = server.accept()
            accepted.close()  # TIME_WAIT stays at the end that closes first.
            client.recv(1)
        return server.getsockname()[1]


def port_is_free(port: int) -> bool:
    """Return whether a server could listen on this port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def service_spec(
    role: str,
    name: str,
    port: int,
    settings: RoleSettings,
    *,
    environment: Mapping[str, str],
    cores: Sequence[int] = (),
) -> ServiceSpec:
    """Return a service's specification: defaults become variables, unless set already; others become flags.

    Raises ClusterFailed if an override names what is fixed.
    """
    prefix = f"SPECDEC_{role.upper()}_"
    fixed = {**settings.fixed, "host": HOST, "port": port}
    if taken := settings.overrides.keys() & fixed:
        name = min(taken)
        remedy = f"use its flags, or specdec serve {role}"
        raise ClusterFailed(f"--{role}-set: this command sets {name} itself, to {_text(fixed[name])}: {remedy}")
    by_environment = {prefix + name.upper(): _text(value) for name, value in settings.defaults.items()}
    by_flag = [_flag(name, value) for name, value in {**settings.overrides, **fixed}.items()]
    return ServiceSpec(
        name=name,
        role=role,
        module=MODULES[role],
        address=f"{HOST}:{port}",
        arguments=tuple(by_flag),
        environment={key: value for key, value in by_environment.items() if key not in environment},
        cores=tuple(cores),
        speaks_http=role == "gateway",
    )


def _http_health(address: str) -> bool | None:
    connection = http.client.HTTPConnection(address, timeout=_PROBE_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except TimeoutError:
        return None
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _flag(name: str, value: object) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={_text(value)}"


def _text(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list() | tuple():
            return ",".join(map(str, value))
        case _:
            return str(value)


class Cluster:
    """Context manager that starts services, waits until they are healthy, and stops them together.

    The services die with the thread that starts them.
    """

    def __init__(
        self,
        specs: Sequence[ServiceSpec],
        *,
        log_dir: Path | None = None,
        timeouts: ClusterTimeouts | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        api_key: str | None = None,
    ) -> None:
        """Take services in the order of their start; they stop in the opposite order.

        With `credentials` health is asked over TLS. `api_key` is for a coordinator whose status needs one. Raises
        ClusterFailed if there is no folder for logs.
        """
        self.timeouts = timeouts or ClusterTimeouts()
        self._credentials = credentials
        self._metadata = None if api_key is None else (("authorization", f"Bearer {api_key}"),)
        try:
            self.log_dir = log_dir or Path(tempfile.mkdtemp(prefix="specdec-"))
            self.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ClusterFailed(f"--log-dir: no folder for logs: {error.strerror}; it or TMPDIR sets one") from error
        self.services = {spec.name: ServiceProcess(spec, self.log_dir / f"{spec.name}.log") for spec in specs}

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """host:port of the coordinator."""
        return self.services["coordinator"].spec.address

    def start(self, on_wait: Callable[[str], None] = lambda what: None) -> None:
        """Start all services and return when all are healthy and the coordinator has reached every replica.

        Args:
            on_wait: called when another service is waited for; after `patience_s` with the last line of its log.

        Raises:
            ClusterFailed: a service ended or took too long; all services are stopped.
        """
        for service in self.services.values():
            port = int(service.spec.address.rpartition(":")[2])
            if not port_is_free(port):
                raise ClusterFailed(f"{service.spec.name}: port {port} is in use")
        try:
            for service in self.services.values():
                try:
                    service.log_path.write_bytes(b"")
                except OSError as error:
                    reason = f"--log-dir: cannot write {service.log_path}: {error.strerror}"
                    raise ClusterFailed(reason) from error
                try:
                    service.start()
                except OSError as error:
                    raise ClusterFailed(f"{service.spec.name} cannot be started: {error}") from error
            for name in self.services:
                self.wait_healthy(name, on_wait)
            if "coordinator" in self.services:
                on_wait("coordinator to reach every replica")
                self.wait_connected()
        except BaseException:
            self.stop()
            raise

    def wait_healthy(self, name: str, on_wait: Callable[[str], None] = lambda what: None) -> None:
        """Return when a service answers SERVING. Raises ClusterFailed when it ends, or does not in time."""
        service, what, told = self.services[name], f"{name} to become healthy", ""
        on_wait(what)
        began_s = time.monotonic()
        with self.probe(service.spec) as is_serving:
            for _ in self._attempts(service, self.timeouts.start_s, "did not become healthy"):
                if is_serving():
                    return
                said = "".join(service.last_log_lines(1))
                if time.monotonic() > began_s + self.timeouts.patience_s and said != told:
                    on_wait(f"{what}; its log ends: {said}")
                    told = said

    def is_healthy(self, name: str) -> bool:
        """Return whether a service answers SERVING at this moment; takes at most a second."""
        with self.probe(self.services[name].spec) as is_serving:
            return bool(is_serving())

    @contextlib.contextmanager
    def probe(self, spec: ServiceSpec) -> Iterator[Callable[[], bool | None]]:
        """Yield a health check of a service over one connection; a check takes at most a second.

        It returns whether the service answers SERVING; None: it accepts a connection, or could, and does not answer.
        """
        if spec.speaks_http:
            yield lambda: _http_health(spec.address)
            return
        with self._channel(spec.address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]

            def is_serving() -> bool | None:
                try:
                    answer = check(health_pb2.HealthCheckRequest(), timeout=_PROBE_S)
                except grpc.RpcError as error:
                    return None if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else False
                return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

            yield is_serving

    def wait_connected(self, num_ready: int | None = None) -> None:
        """Return when the coordinator reports every replica (or this many) ready. Raises ClusterFailed."""
        service = self.services["coordinator"]
        num_replicas = sum(each.spec.role in ("target", "draft") for each in self.services.values())
        wanted = num_replicas if num_ready is None else num_ready
        states: list[str] = []
        with self._channel(service.spec.address) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            for _ in self._attempts(service, self.timeouts.connect_s, "did not reach every replica", states):
                with contextlib.suppress(grpc.RpcError):
                    status = stub.GetStatus(coordinator_pb2.GetStatusRequest(), timeout=1.0, metadata=self._metadata)
                    states[:] = [f"{r.role} {r.address} is {r.state} {r.detail}".rstrip() for r in status.replicas]
                    if any(replica.state == "incompatible" for replica in status.replicas):
                        raise ClusterFailed(f"coordinator: {'; '.join(states)}")
                    if sum(replica.state == "ready" for replica in status.replicas) >= wanted:
                        return

    def _channel(self, address: str) -> grpc.Channel:
        # The default backoff between connection attempts grows to two minutes.
        options = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 250)]
        if self._credentials is None:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, self._credentials, options=options)

    def _attempts(
        self, service: ServiceProcess, timeout_s: float, failure: str, details: Sequence[str] = ()
    ) -> Iterator[None]:
        """Yield every `POLL_S` until the caller leaves. Raises ClusterFailed when a service ends or time is up."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            self.check_running()
            yield
            service.wait(POLL_S)
        raise ClusterFailed(
            "\n".join([f"{service.spec.name} {failure} within {timeout_s:g} s", *details, *end_of_log(service)])
        )

    def check_running(self) -> None:
        """Raise ClusterFailed, with the end of its log, when a service has ended by itself."""
        for service in self.services.values():
            if service.exit_code is not None and not service.told_to_end:
                reason = f"{service.spec.name} {service.describe_end()}"
                raise ClusterFailed("\n".join([reason, *end_of_log(service)]))

    def kill(self, name: str) -> None:
        """Kill a service at once, with its own children; `restart` brings it back."""
        self.services[name].kill()

    def signal(self, name: str, signal_number: int) -> None:
        """Send a signal to a service's own process, for example SIGTERM, or SIGSTOP to make it hang."""
        self.services[name].signal(signal_number)

    def restart(self, name: str) -> None:
        """Stop a service if it runs, start it again on the same port, and return when it is healthy."""
        self._stop([self.services[name]])
        self.services[name].start()
        self.wait_healthy(name)

    def stop(self) -> None:
        """Let all services drain and exit, gateway and coordinator first; kill those that take longer than `stop_s`."""
        self._stop(list(reversed(self.services.values())))

    def _stop(self, services: Sequence[ServiceProcess]) -> None:
        try:
            for service in services:
                service.terminate()
                if service.spec.name in ("gateway", "coordinator"):  # Their requests need the others while they drain.
                    service.wait(self.timeouts.stop_s)
            for service in services:
                service.wait(self.timeouts.stop_s)
        finally:
            for service in services:
                service.kill()


def end_of_log(service: ServiceProcess) -> list[str]:
    """The last lines and the path of a service's log, for an error's message."""
    return [*(f"  | {line}" for line in service.last_log_lines()), f"  log: {service.log_path}"]
