"""Churn that breaks nothing by itself: connections are closed when unused, tenants leave after their streams."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.client import Client
from specdec.commands.up.cluster import free_port
from specdec.coordinator.tenants.api_keys import read_key_file
from tests.adversary.soak.connections import Connections
from tests.adversary.soak.tenants import Tenants
from tests.support.services.key_files import hash_key

NAME = ("client-0", "key")


def is_closed(client: Client) -> bool:
    return bool(client._channel._channel.closed())  # type: ignore[attr-defined]


@pytest.fixture
def connections() -> Connections:
    port = free_port()
    return Connections(lambda client: f"127.0.0.1:{port}")


async def test_a_connection_that_is_given_up_is_closed_with_its_last_stream(connections: Connections) -> None:
    async with connections.use(NAME) as first:
        async with connections.use(NAME) as same:
            assert same is first
            await connections.give_up(NAME)
        assert not is_closed(first)
        async with connections.use(NAME) as fresh:
            assert fresh is not first
    assert is_closed(first)
    assert not is_closed(fresh)
    await connections.close()
    assert is_closed(fresh)
    assert connections.num_opened == 2


async def test_connections_of_tenants_that_left_are_given_up(connections: Connections) -> None:
    async with connections.use(NAME) as one, connections.use(("client-0", "other")) as other:
        pass
    await connections.give_up_all_but(["other"])
    assert is_closed(one)
    assert not is_closed(other)
    await connections.close()


def test_a_tenant_is_known_before_it_asks_and_for_two_changes_after(tmp_path: Path) -> None:
    tenants = Tenants(tmp_path / "keys.json", 3)

    def known() -> set[str]:
        return {key.sha256 for key in read_key_file(tmp_path / "keys.json")}

    history = []
    for _ in range(12):
        before = known()
        tenants.change()
        assert {hash_key(key) for key in tenants.current} <= before, "they may ask at once"
        history.append(list(tenants.current))
        assert {hash_key(tenants.operator)} | {hash_key(k) for past in history[-2:] for k in past} <= known()
    assert len(tenants.current) == 3
    assert set(history[0]).isdisjoint(history[-1])
    assert len(known()) == 1 + 3 + 2 + 1, "the operator, those that ask, those that left, and the next"
