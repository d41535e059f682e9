"""The leader's port for other nodes: who is let in, and what the others are told."""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from specdec.config import TargetSettings
from specdec.config.nodes import NodeSettings, nodes_of
from specdec.engine.parallel.frames import StepKind, receive_frame, text_frame
from specdec.replica.ranks.connections import NodeConnections, PeerUnknown
from specdec.replica.ranks.gate import NodeGate, NodesMissing
from specdec.replica.ranks.messages import Hello, Refused, Welcome, difference, receive, send
from tests.support.for_each import for_each
from tests.support.servers.certificates import Authority, Certificate, SecretVolume

NAMES = ["target.specdec", "replica.specdec"]
OURS = Hello(version="1.0", nnodes=3, settings={"dtype": "auto", "max_model_len": None}, weights_digest="ab")
PATIENCE_S = 20.0


class Secrets:
    """Certificates of one authority, as secrets of nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority("the authority")

    def of(self, certificate: Certificate, trusted: Authority | None = None) -> SecretVolume:
        number = len(list(self.folder.iterdir()))
        return SecretVolume(self.folder / str(number), certificate, (trusted or self.authority).certificate)

    def settings(self, volume: SecretVolume | None, **more: Any) -> NodeSettings:
        tls = {} if volume is None else {"tls_dir": volume.folder, "tls_verify_clients": True}
        given = {"host": "127.0.0.1", "nnodes": 3, "master_addr": "127.0.0.1", **tls, **more}
        return NodeSettings.model_validate(given)


@pytest.fixture
def secrets(tmp_path: Path) -> Secrets:
    return Secrets(tmp_path)


@pytest.fixture
def volume(secrets: Secrets) -> SecretVolume:
    return secrets.of(secrets.authority.issue("target", dns_names=NAMES))


class Open:
    """A gate of a group of three nodes with two ranks each."""

    def __init__(self, settings: NodeSettings) -> None:
        self.nodes: queue.Queue[tuple[str, socket.socket]] = queue.Queue()
        self.may_watch = threading.Event()
        self.may_watch.set()
        self.gate = NodeGate(
            settings.model_copy(update={"master_port": 0}),
            OURS,
            4321,
            2,
            PATIENCE_S,
            self._watch,
        )

    def _watch(self, name: str, connection: socket.socket) -> None:
        assert self.may_watch.wait(PATIENCE_S)
        self.nodes.put((name, connection))

    def call(self, settings: NodeSettings, hello: Hello) -> tuple[socket.socket, Welcome]:
        connection = NodeConnections(settings).call("127.0.0.1", self.gate.port)
        try:
            send(connection, StepKind.HELLO, hello)
            return connection, receive(connection, StepKind.WELCOME, Welcome)
        except BaseException:
            connection.close()
            raise


@contextmanager
def opened(settings: NodeSettings) -> Iterator[Open]:
    made = Open(settings)
    try:
        yield made
    finally:
        made.gate.close()
        while not made.nodes.empty():
            made.nodes.get()[1].close()


def node(number: int, **changes: Any) -> Hello:
    return OURS.model_copy(update={"node_rank": number, **changes})


@pytest.mark.parametrize("has_tls", [True, False])
def test_ranks_are_handed_over_in_their_order_once_all_have_come(
    has_tls: bool, secrets: Secrets, volume: SecretVolume
) -> None:
    settings = secrets.settings(volume if has_tls else None)
    with opened(settings) as door:
        callers = []
        for number in (2, 1):
            connection, welcome = door.call(settings, node(number))
            callers.append(connection)
            assert welcome.store_port == 4321
            name, theirs = door.nodes.get(timeout=PATIENCE_S)
            assert name == f"node {number} (127.0.0.1)"
            send(theirs, StepKind.BEAT)
            assert receive_frame(connection).kind is StepKind.BEAT
            theirs.close()
            for rank in (2 * number + 1, 2 * number):
                callers.append(door.call(settings, node(number, rank=rank, token=welcome.token))[0])
        ranks = door.gate.wait(PATIENCE_S)
        for number, rank in enumerate(ranks, start=2):
            send(rank, StepKind.LOADED, str(number))
        told = [receive_frame(caller).payload.decode() for caller in (callers[5], callers[4], callers[2], callers[1])]
        assert told == ["2", "3", "4", "5"]
        door.gate.close()
        with pytest.raises(OSError):
            door.call(settings, node(1))
        for one in (*callers, *ranks):
            one.close()


def test_a_node_is_not_there_before_it_is_watched() -> None:
    settings = NodeSettings(host="127.0.0.1", nnodes=3)
    with opened(settings) as door, ExitStack() as stack:
        door.may_watch.clear()
        for number in (1, 2):
            connection, welcome = door.call(settings, node(number))
            stack.enter_context(connection)
            for rank in (2 * number, 2 * number + 1):
                stack.enter_context(door.call(settings, node(number, rank=rank, token=welcome.token))[0])
        with pytest.raises(NodesMissing, match="nnodes: nodes 1, 2 did not join"):
            door.gate.wait(0.1)
        door.may_watch.set()
        for connection in door.gate.wait(PATIENCE_S):
            connection.close()
        assert door.nodes.qsize() == 2


@for_each(
    "hello, reason",
    [
        (node(1, version="0.9"), "version is 0.9 at node 1 and 1.0 at the leader"),
        (node(1, nnodes=2), "nnodes is 2 at node 1 and 3 at the leader"),
        (node(2, settings={"dtype": "float32"}), "dtype is float32 at node 2 and auto at the leader"),
        (node(1, settings={"dtype": "auto", "max_model_len": 10**30}), "max_model_len is 1000000"),
        (node(1, weights_digest="cd"), "node 1 has other weights than the leader"),
        (node(2, config_digest="cd"), "node 2 has another config.json than the leader"),
        (node(0), "node_rank 0 is not between 1 and 2"),
        (node(3), "node_rank 3 is not between 1 and 2"),
        (node(1, rank=2), "rank 2 of node 1 belongs to another group"),
        (node(1, rank=2, token="0" * 32), "belongs to another group"),
    ],
)
def test_a_node_that_differs_is_told_why_in_one_line(hello: Hello, reason: str) -> None:
    settings = NodeSettings(host="127.0.0.1", nnodes=3)
    with opened(settings) as door:
        with pytest.raises(Refused, match=reason) as told:
            door.call(settings, hello)
        assert "\n" not in str(told.value)
        with pytest.raises(
            NodesMissing, match=f"nodes 1, 2 did not join within load_timeout_s; the last refusal: .*{reason}"
        ):
            door.gate.wait(0.0)


def test_no_place_is_taken_twice_and_none_of_another_node() -> None:
    settings = NodeSettings(host="127.0.0.1", nnodes=3)
    with opened(settings) as door:
        first, welcome = door.call(settings, node(1))
        with closing(first):
            with pytest.raises(Refused, match=r"node 1 has joined already, from 127\.0\.0\.1"):
                door.call(settings, node(1))
            own, _ = door.call(settings, node(1, rank=2, token=welcome.token))
            own.close()
            for rank in (0, 1, 2, 4, 63):
                with pytest.raises(Refused, match=f"rank {rank} is not one that node 1 has to bring"):
                    door.call(settings, node(1, rank=rank, token=welcome.token))


def test_strangers_get_no_further_than_tls_and_the_right_node_comes_in_after_them(
    secrets: Secrets, volume: SecretVolume
) -> None:
    settings = secrets.settings(volume)
    issue, other = secrets.authority.issue, Authority("another")
    strangers: dict[str, tuple[NodeSettings, type[Exception]]] = {
        "no TLS": (secrets.settings(None), OSError),
        "another authority's": (
            secrets.settings(secrets.of(other.issue("target", dns_names=NAMES), secrets.authority)),
            OSError,
        ),
        "a draft's": (secrets.settings(secrets.of(issue("draft", dns_names=NAMES[1:]))), Refused),
        "no DNS name": (secrets.settings(secrets.of(issue("target.specdec"))), Refused),
        "expired": (
            secrets.settings(secrets.of(issue("target", dns_names=NAMES, valid_for=timedelta(days=-1)))),
            OSError,
        ),
    }
    with opened(settings) as door:
        for stranger, error in strangers.values():
            with pytest.raises(error):
                door.call(stranger, node(1))
        assert door.nodes.empty()
        connection, _ = door.call(settings, node(1))
        connection.close()


def test_a_node_does_not_join_a_leader_with_another_certificate(secrets: Secrets, volume: SecretVolume) -> None:
    other = secrets.of(secrets.authority.issue("other", dns_names=["other.specdec"]))
    with (
        opened(secrets.settings(other)) as door,
        pytest.raises(PeerUnknown, match=r"tls_dir: the certificate of 127.0.0.1 lacks the name replica.specdec"),
    ):
        door.call(secrets.settings(volume), node(1))


def _header(kind: int, num_bytes: int) -> bytes:
    return struct.pack("<9q", kind, num_bytes, *(0,) * 7)


@for_each(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        _header(99, 0),
        _header(StepKind.HELLO, 2**40),
        _header(StepKind.HELLO, 1 << 17),
        _header(StepKind.HELLO, -1),
        _header(StepKind.FORWARD, 0),
        text_frame(StepKind.HELLO, "null").encode(),
        text_frame(StepKind.HELLO, '{"version": 1}').encode(),
        text_frame(StepKind.HELLO, '{"version": "' + "x" * 60000 + '"}').encode(),
        text_frame(StepKind.HELLO, '{"version": "1.0", "node_rank": 1e300}').encode(),
        text_frame(StepKind.HELLO, '{"version": "1.0", "settings": ' + "[" * 20000 + "}").encode(),
        text_frame(StepKind.HELLO, '{"version": "1.0", "rank": -1}').encode(),
    ],
)
def test_noise_ends_its_own_connection_only(data: bytes) -> None:
    settings = NodeSettings(host="127.0.0.1", nnodes=3)
    with opened(settings) as door:
        noise = socket.create_connection(("127.0.0.1", door.gate.port), PATIENCE_S)
        with closing(noise), suppress(ConnectionError):  # it may be closed with bytes unread
            noise.sendall(data)
            with suppress(OSError):  # not connected any more
                noise.shutdown(socket.SHUT_WR)
            while noise.recv(4096):
                pass
        connection, _ = door.call(settings, node(1))
        connection.close()


def test_silent_connections_keep_no_node_out() -> None:
    settings = NodeSettings(host="127.0.0.1", nnodes=3)
    with opened(settings) as door:
        silent = [socket.create_connection(("127.0.0.1", door.gate.port)) for _ in range(200)]
        connection, _ = door.call(settings, node(2))
        for one in (*silent, connection):
            one.close()


def test_settings_of_one_node_may_differ() -> None:
    assert difference(OURS, node(1)) is None


@for_each(
    "settings, reason",
    [
        ({"node_rank": 2}, "node_rank 2 is not below nnodes 2"),
        ({"node_rank": 1, "host": "127.0.0.1"}, "master_addr is needed: node_rank is 1"),
        ({}, "allow_unauthenticated behind network policies"),
        ({"host": "127.0.0.1", "tensor_parallel_size": 3}, "nnodes 2 does not divide tensor_parallel_size 3"),
        ({"host": "127.0.0.1", "tensor_parallel_size": 1}, "nnodes 2 does not divide tensor_parallel_size 1"),
        ({"nnodes": 65}, "nnodes"),
        ({"master_port": 65536}, "master_port"),
        ({"node_timeout_s": float("nan")}, "node_timeout_s"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_their_names(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        TargetSettings.model_validate({"model": "m", "nnodes": 2, "tensor_parallel_size": 2, **settings})


def test_a_group_over_nodes_restarts_no_engine_and_one_node_does() -> None:
    common: dict[str, Any] = {"model": "m", "tensor_parallel_size": 4, "host": "127.0.0.1"}
    alone, of_two = TargetSettings(**common), TargetSettings(**common, nnodes=2)
    assert (alone.most_engine_restarts, of_two.most_engine_restarts) == (5, 0)
    assert nodes_of(of_two).nnodes == 2
