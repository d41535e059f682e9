"""Where /metrics listens."""

from __future__ import annotations

import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Gauge

from specdec.cli.cluster import free_port
from specdec.config import TargetSettings
from specdec.rpc.metrics_endpoint import metrics_endpoint
from specdec.rpc.startup import StartupFailed


def _has(family: socket.AddressFamily, address: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "expected"),
    [("0.0.0.0", {"127.0.0.1", "[::1]"}), ("127.0.0.1", {"127.0.0.1"})],
)
def test_a_wildcard_is_all_of_the_machines_addresses_and_another_address_is_itself(
    host: str, expected: set[str]
) -> None:
    if not _has(socket.AF_INET6, "::1"):
        expected = expected - {"[::1]"}
    registry = CollectorRegistry()
    Gauge("answer", "A number.", registry=registry).set(42)
    settings = TargetSettings(model="m", host=host, metrics_port=free_port())
    answered = set()
    with metrics_endpoint(settings, registry) as port:
        for address in ("127.0.0.1", "[::1]"):
            try:
                with urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=30) as page:
                    assert b"answer 42.0" in page.read()
            except OSError:
                continue
            answered.add(address)
    assert answered == expected


def test_a_port_that_is_taken_is_named_with_its_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        settings = TargetSettings(model="m", metrics_port=taken.getsockname()[1])
        with (
            pytest.raises(StartupFailed, match=r"^metrics_port: cannot listen on 0\.0\.0\.0:"),
            metrics_endpoint(settings, CollectorRegistry()),
        ):
            pass
