"""Sockets between engines of one host, through the ports that poll them."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

import pytest

from specdec.replica.bridge import local_sockets
from specdec.replica.bridge.frame_codec import FIRST_LOCAL, HEADER
from specdec.replica.bridge.frames import EnginePort, Frame, FrameKind

pytestmark = pytest.mark.smoke
WAIT_S = 10.0


@pytest.fixture
def ports() -> Iterator[tuple[EnginePort, EnginePort]]:
    """A target's and a draft's, with servicers that say nothing."""
    pairs = [socket.socketpair() for _ in range(2)]
    target, draft = (EnginePort(ours) for ours, _ in pairs)
    yield target, draft
    for port, (_, theirs) in zip((target, draft), pairs, strict=True):
        port.close()
        theirs.close()


def connected(target: EnginePort, draft: EnginePort) -> tuple[int, int]:
    """Ids of a connection at both ends."""
    name = target.local.listen()
    if not name:
        pytest.fail("no abstract sockets on this kernel")
    stream_id = draft.local.connect(name)
    (opened,) = target.poll(WAIT_S)
    assert stream_id is not None
    assert opened.kind is FrameKind.LINK_OPENED
    assert min(stream_id, opened.stream_id) >= FIRST_LOCAL
    return opened.stream_id, stream_id


def raw(target: EnginePort) -> tuple[socket.socket, int]:
    """A connection that is no engine's, and its id at the target."""
    name = target.local.listen()
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.connect(f"\0{name}")
    (opened,) = target.poll(WAIT_S)
    return peer, opened.stream_id


def test_messages_pass_both_ways_and_wake_the_poll(ports: tuple[EnginePort, EnginePort]) -> None:
    target, draft = ports
    at_target, at_draft = connected(target, draft)
    draft.send(FrameKind.MESSAGE, at_draft, b"join")
    assert target.poll(WAIT_S) == [Frame(FrameKind.MESSAGE, at_target, b"join")]
    large = bytes(3 << 20)
    target.send(FrameKind.MESSAGE, at_target, large)
    assert target.pending_bytes(at_target) > 0
    got: list[Frame] = []
    while not got:
        got = draft.poll(0)
        target.poll(0)
    assert got == [Frame(FrameKind.MESSAGE, at_draft, large)]
    assert target.pending_bytes(at_target) == 0


def test_an_end_is_told_to_the_other_end(ports: tuple[EnginePort, EnginePort]) -> None:
    target, draft = ports
    at_target, at_draft = connected(target, draft)
    target.send(FrameKind.STREAM_ABORT, at_target, b"")
    (closed,) = draft.poll(WAIT_S)
    assert (closed.kind, closed.stream_id) == (FrameKind.STREAM_CLOSED, at_draft)
    assert at_target not in target.local
    assert at_draft not in draft.local


@pytest.mark.parametrize(
    "payload",
    [b"\xff" * 40, HEADER.pack(1 << 31, FrameKind.MESSAGE, 1), HEADER.pack(0, FrameKind.SHUTDOWN, 0)],
    ids=["garbage", "too long", "a servicer's frame"],
)
def test_what_is_no_message_closes_its_connection_only(ports: tuple[EnginePort, EnginePort], payload: bytes) -> None:
    target, draft = ports
    at_target, at_draft = connected(target, draft)
    peer, bad = raw(target)
    with peer:
        peer.sendall(payload)
        assert [(frame.kind, frame.stream_id) for frame in target.poll(WAIT_S)] == [(FrameKind.STREAM_CLOSED, bad)]
        assert peer.recv(1) == b""
    draft.send(FrameKind.MESSAGE, at_draft, b"on")
    assert target.poll(WAIT_S) == [Frame(FrameKind.MESSAGE, at_target, b"on")]


def test_other_users_and_too_many_connections_get_no_answer(
    ports: tuple[EnginePort, EnginePort], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = ports
    name = target.local.listen()
    user = os.geteuid()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: user + 1)
        assert draft.local.connect(name) is None
    monkeypatch.setattr(local_sockets, "_MOST_SOCKETS", 2)
    assert draft.local.connect(name) is not None
    assert draft.local.connect(name) is not None
    assert draft.local.connect(name) is None


def test_a_listener_without_room_is_not_waited_for(ports: tuple[EnginePort, EnginePort]) -> None:
    _, draft = ports
    other = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with other:
        other.bind("\0specdec-link-full")
        other.listen(0)
        ids = [draft.local.connect("specdec-link-full") for _ in range(4)]
    assert ids[0] is not None
    assert ids[-1] is None


def test_no_descriptor_is_no_connection(ports: tuple[EnginePort, EnginePort], monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = ports
    name = target.local.listen()

    def refuse(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(socket, "socket", refuse)
    assert draft.local.connect(name) is None


def test_a_crowd_of_connections_is_taken_in_parts(
    ports: tuple[EnginePort, EnginePort], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = ports
    name = target.local.listen()
    monkeypatch.setattr(local_sockets, "_MOST_SOCKETS", 2)
    monkeypatch.setattr(os, "geteuid", lambda: -1)  # all are other users'
    peers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
    for peer in peers:
        peer.connect(f"\0{name}")
        peer.setblocking(False)
    assert target.local.receive() == []
    with pytest.raises(BlockingIOError):
        peers[2].recv(1)
    assert target.local.receive() == []
    assert [peer.recv(1) for peer in peers] == [b""] * 3
    for peer in peers:
        peer.close()


def test_a_name_that_leads_to_no_engine_is_not_called(ports: tuple[EnginePort, EnginePort]) -> None:
    _, draft = ports
    other = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with other:
        other.bind("\0another-service")
        other.listen()
        for name in ("another-service", "specdec-link-gone", "specdec-link-" + "x" * 200, "specdec-link-ü", ""):
            assert draft.local.connect(name) is None
