"""What /metrics of real services tells of certificates while their files are renewed, well and badly."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from specdec.commands.up.cluster import free_port
from specdec.service.tls_watch import TlsWatch, validity_of
from specdec.telemetry.tls_metrics import TlsMetrics
from specdec.wire.tls_files import TlsFiles, server_context
from tests.support.servers.certificates import Authority, Certificate, SecretVolume
from tests.support.servers.redis_server import redis_client
from tests.support.services.faults import eventually, scrape
from tests.support.services.one_service import running
from tests.support.services.secured import call_target, open_tls, ready_server, replica_tls, secure

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

EXPIRY = "specdec_tls_certificate_expiry_timestamp_seconds"
LIFETIME = "specdec_tls_certificate_lifetime_seconds"
REFUSED = "specdec_tls_files_refused"
FAILURES = "specdec_tls_renewal_failures_total"


def expiry(certificate: Certificate) -> float:
    return x509.load_pem_x509_certificate(certificate.chain).not_valid_after_utc.timestamp()


async def shows(port: int, expected: dict[str, float]) -> None:
    """Wait until a page has these samples."""

    async def is_shown() -> bool:
        samples = await asyncio.to_thread(scrape, port)
        return {name: samples.get(name) for name in expected} == expected

    await eventually(is_shown, f"the page shows {expected}")


def of(use: str, certificate: Certificate, refused: int, failures: int) -> dict[str, float]:
    return {
        f"{EXPIRY}{{use={use}}}": expiry(certificate),
        f"{REFUSED}{{use={use}}}": refused,
        f"{FAILURES}{{use={use}}}": failures,
    }


async def test_a_server_tells_of_its_certificate_without_a_connection_while_the_files_change(tmp_path: Path) -> None:
    secured = secure(tmp_path / "server")
    authority = secured.authority.certificate
    first, second, third = (secured.authority.issue("server", valid_for=timedelta(days=days)) for days in (1, 2, 3))
    secured.volume.write(first, authority)
    async with ready_server(secured.volume) as (_process, listening):
        port = listening["metrics_port"]
        await shows(port, of("server", first, refused=0, failures=0))
        secured.volume.write(second, authority)
        await shows(port, {**of("server", second, refused=0, failures=0), f"{LIFETIME}{{use=server}}": 4 * 86400.0})

        secured.volume.write(Certificate(first.key, third.chain), authority)
        await shows(port, of("server", second, refused=1, failures=1))
        async with open_tls(listening["port"], secured.credentials()) as channel:
            assert await call_target(channel)  # with the last good certificate

        secured.volume.write(third, authority)
        await shows(port, of("server", third, refused=0, failures=1))


async def test_a_coordinator_tells_of_what_it_shows_to_replicas_redis_and_the_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority("the authority")
    lives = {"replicas": 2, "redis": 3, "otlp": 4}
    shown = {use: authority.issue(use, valid_for=timedelta(days=days)) for use, days in lives.items()}
    volumes = {use: SecretVolume(tmp_path / use, one, authority.certificate) for use, one in shown.items()}
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", str(volumes["otlp"].certificate))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_KEY", str(volumes["otlp"].key))
    port = free_port()
    nowhere = f"127.0.0.1:{free_port()}"
    settings = {
        "metrics_port": port,
        "targets": nowhere,
        "redis_url": f"rediss://{nowhere}",
        "otlp_endpoint": f"https://{nowhere}",
        **replica_tls(volumes["replicas"]),
        **redis_client(volumes["redis"]),
    }
    async with running("coordinator", settings, tmp_path) as coordinator:

        async def is_up() -> bool:
            assert coordinator.is_running, coordinator.last_log_lines()
            try:
                await asyncio.to_thread(scrape, port)
            except OSError:
                return False
            return True

        await eventually(is_up, "the page is there")
        for use, certificate in shown.items():
            await shows(port, of(use, certificate, refused=0, failures=0))
        for number, use in enumerate(shown):
            other = list(shown.values())[number - 1]
            volumes[use].write(Certificate(other.key, shown[use].chain), authority.certificate)
            await shows(port, of(use, shown[use], refused=1, failures=1))
        samples = await asyncio.to_thread(scrape, port)
        assert f"{EXPIRY}{{use=server}}" not in samples  # it serves without TLS


def test_a_certificate_that_expires_in_use_is_told_once_and_its_renewal_ends_that(tmp_path: Path) -> None:
    secured = secure(tmp_path / "server")
    authority = secured.authority
    files = TlsFiles(server_context, secured.volume.paths("tls_dir"))
    watch = TlsWatch(TlsMetrics(CollectorRegistry()), dict)

    def told() -> list[tuple[str, str]]:
        with capture_logs() as logs:
            watch.look("server", files)
        return [(line["event"], line["use"]) for line in logs if line["event"] == "certificate_expired"]

    for _ in range(2):
        secured.volume.write(authority.issue("server"), authority.certificate)
        assert told() == []
        secured.volume.write(authority.issue("server", valid_for=timedelta(seconds=-1)), authority.certificate)
        assert told() == [("certificate_expired", "server")]
        assert told() == []


def test_of_a_chain_the_certificate_counts_that_expires_first() -> None:
    authority = Authority("the authority")
    leaf, intermediate = (authority.issue("one", valid_for=timedelta(days=days)) for days in (9, 3))
    validity = validity_of(leaf.chain + intermediate.chain)
    assert validity.not_after_s == expiry(intermediate)
    assert validity.lifetime_s == timedelta(days=5).total_seconds()
    with pytest.raises(ValueError):
        validity_of(b"no PEM")
