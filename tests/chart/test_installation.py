"""What the chart installs, run here: the rendered commands, with real certificates, Redis, keys and models."""

from __future__ import annotations

import asyncio
import os
import re
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import SecretStr

from specdec.commands.up import service_process
from specdec.commands.up.cluster import free_port
from specdec.store.urls import RedisOptions, connect
from specdec.wire.tls_files import TlsFile, TlsPaths
from tests.chart.redis_process import started, until_up
from tests.chart.rendered import ROOT, SETTINGS, WITH_REDIS, Document, Render, component, containers
from tests.support.servers.certificates import Authority, SecretVolume
from tests.support.services.faults import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SPECDEC = str(Path(sys.executable).with_name("specdec"))
COMMAND = (sys.executable, "-m", "specdec.commands.main")
SECRET = "a secret of a certain length"


class Installation:
    """The objects of a case, with places on this machine for what they name."""

    def __init__(self, documents: list[Document], folder: Path) -> None:
        self.documents = documents
        self.folder = folder
        self.ports = {(role, port["name"]): free_port() for role, _, c in containers(documents) for port in c["ports"]}
        authority = Authority("internal")
        for certificate in (document["spec"] for document in documents if document["kind"] == "Certificate"):
            issued = authority.issue(certificate["secretName"], dns_names=certificate["dnsNames"])
            SecretVolume(self.secret(certificate["secretName"]), issued, authority.certificate)
        made = subprocess.run(
            [SPECDEC, "keys", "new", "--id", "test", "--tenant", "t"], capture_output=True, check=True
        )
        self.api_key, _, entry = made.stdout.decode().partition("\n")
        self.secret("specdec-api-keys").mkdir()
        (self.secret("specdec-api-keys") / "api-keys.yaml").write_text(yaml.safe_dump({"keys": yaml.safe_load(entry)}))

    def secret(self, name: str) -> Path:
        """The folder of a secret."""
        return self.folder / name

    def arguments(self, role: str, pod: Document, container: Document, redis_port: int) -> list[str]:
        """The container's arguments for this machine."""
        places = {
            "/models/": f"{ROOT}/models/",
            "$(POD_IP)": "127.0.0.1",
            "demo-specdec-redis:6379": f"127.0.0.1:{redis_port}",
        }
        for port in container.get("ports", []):
            option = {"grpc": "--port", "http": "--port", "metrics": "--metrics-port", "health": "--health-port"}[
                port["name"]
            ]
            places[f"{option}={port['containerPort']}"] = f"{option}={self.ports[role, port['name']]}"
        for replica, port_number in (("target", 50052), ("draft", 50053)):
            address = f"127.0.0.1:{self.ports[replica, 'grpc']}"
            places[f"dns:///demo-specdec-{replica}-headless:{port_number}"] = address
        places["dns:///demo-specdec-coordinator-headless:50051"] = f"localhost:{self.ports['coordinator', 'grpc']}"
        places["demo-specdec-gateway:8000"] = f"localhost:{self.ports['gateway', 'http']}"
        places["demo-specdec-coordinator:50051"] = f"localhost:{self.ports['coordinator', 'grpc']}"
        if role in WITH_REDIS:  # What it registers.
            places[f"127.0.0.1:{SETTINGS[role].model_fields['port'].default}"] = f"127.0.0.1:{self.ports[role, 'grpc']}"
        names = {volume["name"]: volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
        for mount in container["volumeMounts"]:
            if mount["name"] in names:
                places[mount["mountPath"]] = str(self.secret(names[mount["name"]]))
        arguments = container["args"]
        for place, here in places.items():
            arguments = [argument.replace(place, here) for argument in arguments]
        return arguments

    def environment(self, container: Document) -> dict[str, str]:
        """The secrets of the container's environment, and this machine's caches."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SPECDEC_")}
        secrets = [v["name"] for v in container["env"] if "secretKeyRef" in v.get("valueFrom", {})]
        return kept | dict.fromkeys(secrets, SECRET) | {"SPECDEC_API_KEY": self.api_key}

    @contextmanager
    def running(self, role: str, pod: Document, container: Document, redis_port: int) -> Iterator[None]:
        """The container's process."""
        assert container["command"][0] == "specdec"
        command = [*COMMAND, *container["command"][1:], *self.arguments(role, pod, container, redis_port)]
        start = service_process.subprocess.Popen  # the fork server's
        with (self.folder / f"{role}.log").open("w") as log:
            process = start(command, cwd=str(ROOT), env=self.environment(container), stdout=log, stderr=log)
            try:
                yield
            finally:
                process.terminate()
                process.wait()

    async def until_ready(self, role: str, container: Document) -> None:
        """Waits as the kubelet does, by the readiness probe."""
        log = self.folder / f"{role}.log"
        if "httpGet" in container["readinessProbe"]:
            path = container["readinessProbe"]["httpGet"]["path"]
            url = f"http://127.0.0.1:{self.ports[role, 'health']}{path}"

            async def answers() -> bool:
                try:
                    return await asyncio.to_thread(urllib.request.urlopen, url, timeout=3) is not None
                except OSError:
                    return False

            try:
                await eventually(answers, f"{role} is ready", timeout_s=200.0)
            except AssertionError:
                pytest.fail(log.read_text()[-5000:])
            return
        probe = container["readinessProbe"]["grpc"]
        (name,) = [port["name"] for port in container["ports"] if port["containerPort"] == probe["port"]]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.ports[role, name]}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            async def is_serving() -> bool:
                request = health_pb2.HealthCheckRequest(service=probe["service"])
                try:
                    response = await stub.Check(request, timeout=3, wait_for_ready=True)
                except grpc.aio.AioRpcError:
                    return False
                return response.status == health_pb2.HealthCheckResponse.SERVING

            try:
                await eventually(is_serving, f"{role} is ready", timeout_s=200.0)
            except AssertionError:
                pytest.fail(log.read_text()[-5000:])

    def scrape(self, monitor: Document, *, with_certificate: bool) -> str:
        """The metrics page, read as the ServiceMonitor says."""
        (endpoint,) = monitor["spec"]["endpoints"]
        settings = endpoint["tlsConfig"]
        ca, cert = (self.secret(settings[name]["secret"]["name"]) for name in ("ca", "cert"))
        context = ssl.create_default_context(cafile=str(ca / settings["ca"]["secret"]["key"]))
        context.check_hostname = False  # Called by address; serverName is compared with the certificate elsewhere.
        if with_certificate:
            context.load_cert_chain(cert / settings["cert"]["secret"]["key"], cert / settings["keySecret"]["key"])
        port = self.ports[component(monitor), endpoint["port"]]
        with urllib.request.urlopen(f"{endpoint['scheme']}://127.0.0.1:{port}/metrics", context=context) as page:
            text: str = page.read().decode()
        return text


@pytest.fixture
async def installation(render: Render, tmp_path: Path) -> AsyncIterator[tuple[Installation, int]]:
    """All that the case installs, ready."""
    documents = render("one-machine")
    installed = Installation(documents, tmp_path)
    async with AsyncExitStack() as stack:
        redis_folder = tmp_path / "redis"
        redis_folder.mkdir()
        (redis_folder / "tls").symlink_to(installed.secret("demo-specdec-redis-tls"))
        redis = stack.enter_context(started(documents, redis_folder, SECRET))
        await until_up(redis)
        services = list(containers(documents))
        for role, pod, container in services:
            stack.enter_context(installed.running(role, pod, container, redis.port))
        for role, _, container in services:
            await installed.until_ready(role, container)
        yield installed, redis.port


async def test_what_the_chart_renders_starts_registers_generates_and_is_scraped(
    installation: tuple[Installation, int],
) -> None:
    installed, redis_port = installation
    pods = {d["metadata"]["name"]: d["spec"] for d in installed.documents if d["kind"] == "Pod"}
    pod, over_http = pods["demo-specdec-generate"], pods["demo-specdec-complete"]
    (container,) = pod["containers"]
    arguments = installed.arguments("coordinator", pod, container, redis_port)
    command = [sys.executable, *container["command"][1:], *arguments]
    environment = installed.environment(container)
    environment["PATH"] = f"{Path(SPECDEC).parent}:{os.environ['PATH']}"
    done = await asyncio.to_thread(subprocess.run, command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\w{3,}", done.stdout)

    environment["SPECDEC_API_KEY"] = "not a key"
    refused = await asyncio.to_thread(subprocess.run, command, env=environment, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "UNAUTHENTICATED" in refused.stdout + refused.stderr

    (container,) = over_http["containers"]
    arguments = installed.arguments("gateway", over_http, container, redis_port)
    asked = [sys.executable, *container["command"][1:], *arguments]
    for key, status, said in ((installed.api_key, 0, r"\w{3,}"), ("not a key", 1, "invalid_api_key")):
        environment["SPECDEC_API_KEY"] = key
        done = await asyncio.to_thread(subprocess.run, asked, env=environment, capture_output=True, text=True)
        assert (done.returncode, bool(re.search(said, done.stdout + done.stderr))) == (status, True), done.stderr

    authority = installed.secret("demo-specdec-redis-tls") / "ca.crt"
    options = RedisOptions(
        password=SecretStr(SECRET), tls=TlsPaths(authorities=TlsFile("redis_tls_dir", authority)), timeout_s=5.0
    )
    store = connect(f"rediss://127.0.0.1:{redis_port}/0", options)
    addresses = {(role, f"127.0.0.1:{installed.ports[role, 'grpc']}") for role in WITH_REDIS}

    async def are_registered() -> bool:
        return {(record.role, record.address) for record in await store.replicas()} == addresses

    await eventually(are_registered, "all services are in the registry")
    await store.close()

    for monitor in (document for document in installed.documents if document["kind"] == "ServiceMonitor"):
        page = await asyncio.to_thread(installed.scrape, monitor, with_certificate=True)
        assert "specdec_build_info" in page
        with pytest.raises((ssl.SSLError, urllib.error.URLError, ConnectionError)):
            await asyncio.to_thread(installed.scrape, monitor, with_certificate=False)
