"""A service that anybody may call says so in one loud line; one with keys, mTLS or on loopback does not."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from specdec.config import CoordinatorSettings
from specdec.service.listening import is_loopback, warn_if_open
from tests.support.services.gateways import gateway


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("a.name", False),
    ],
)
def test_loopback_is_known_without_resolving_names(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("host", "verifies_clients", "has_keys", "warns"),
    [
        ("0.0.0.0", False, False, True),
        ("0.0.0.0", True, False, False),
        ("0.0.0.0", False, True, False),
        ("127.0.0.1", False, False, False),
    ],
)
def test_who_is_open_to_all_says_so_once(host: str, verifies_clients: bool, has_keys: bool, warns: bool) -> None:
    with capture_logs() as logs:
        warn_if_open(host, verifies_clients=verifies_clients, has_keys=has_keys, remedy="keys")
    assert [line["event"] for line in logs] == ["open_to_all"] * warns


def test_a_coordinators_keys_are_known_by_its_settings() -> None:
    assert not CoordinatorSettings(targets=("a:1",)).has_keys
    assert CoordinatorSettings.model_validate({"targets": "a:1", "api_keys_file": "keys.yaml"}).has_keys


async def test_a_gateway_beyond_loopback_warns() -> None:
    with capture_logs() as logs:
        async with gateway("127.0.0.1:1", host="0.0.0.0"):
            pass
        async with gateway("127.0.0.1:1"):
            pass
    assert [line["host"] for line in logs if line["event"] == "open_to_all"] == ["0.0.0.0"]
