"""Frames, and the engine's port, over real sockets."""

import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.replica.bridge.frame_codec import HEADER, MAX_PAYLOAD_BYTES, FrameDecoder, encode_frame
from specdec.replica.bridge.frames import EnginePort, Frame, FrameError, FrameKind, PeerGone
from tests.support.cost import lines_run

FRAMES = st.builds(
    Frame, st.sampled_from(FrameKind), st.integers(min_value=0, max_value=2**32 - 1), st.binary(max_size=300)
)


@pytest.fixture
def pair() -> Iterator[tuple[EnginePort, socket.socket]]:
    ours, theirs = socket.socketpair()
    port = EnginePort(ours)
    yield port, theirs
    port.close()
    theirs.close()


def encoded(*frames: Frame) -> bytes:
    return b"".join(b"".join(encode_frame(*frame)) for frame in frames)


def receive_frames(connection: socket.socket, number: int) -> list[Frame]:
    decoder = FrameDecoder()
    frames: list[Frame] = []
    while len(frames) < number:
        frames += decoder.feed(connection.recv(65536))
    return frames


@given(st.lists(FRAMES, max_size=8), st.integers(min_value=1, max_value=64))
def test_frames_survive_being_cut_anywhere(frames: list[Frame], piece_bytes: int) -> None:
    data = encoded(*frames)
    decoder = FrameDecoder()
    pieces = [data[start : start + piece_bytes] for start in range(0, len(data), piece_bytes)]

    decoded = [frame for piece in pieces for frame in decoder.feed(piece)]

    assert decoded == frames
    assert decoder.feed(encoded(*frames)) == frames, "nothing was left over"


def test_large_payload_is_not_copied_into_the_header_buffer() -> None:
    payload = bytes(1024 * 1024)
    assert encode_frame(FrameKind.MESSAGE, 3, payload)[1] is payload


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(FrameError, match="unknown frame kind 200"):
        FrameDecoder().feed(HEADER.pack(0, 200, 0))


def test_length_over_the_limit_is_refused_before_the_payload_arrives() -> None:
    with pytest.raises(FrameError, match="over the limit"):
        FrameDecoder().feed(HEADER.pack(MAX_PAYLOAD_BYTES + 1, FrameKind.MESSAGE, 1))


def test_poll_returns_all_frames_that_have_arrived(pair: tuple[EnginePort, socket.socket]) -> None:
    port, peer = pair
    sent = [Frame(FrameKind.STREAM_OPENED, 1, b""), Frame(FrameKind.MESSAGE, 1, b"a" * 100_000)]
    peer.sendall(encoded(*sent))

    assert port.poll(5.0) == sent
    assert port.poll(0) == []


def test_poll_times_out_empty_handed(pair: tuple[EnginePort, socket.socket]) -> None:
    port, _ = pair
    assert port.poll(0.01) == []


def test_poll_without_timeout_wakes_up_for_a_frame(pair: tuple[EnginePort, socket.socket]) -> None:
    port, peer = pair
    threading.Timer(0.01, peer.sendall, [encoded(Frame(FrameKind.DRAIN, 0, b""))]).start()

    assert port.poll(None) == [Frame(FrameKind.DRAIN, 0, b"")]


def test_sending_to_a_peer_that_does_not_read_never_blocks(pair: tuple[EnginePort, socket.socket]) -> None:
    port, peer = pair
    sent = [Frame(FrameKind.MESSAGE, stream_id, bytes([stream_id]) * 200_000) for stream_id in range(1, 11)]
    for frame in sent:
        port.send(*frame)

    assert port.pending_bytes() > 0
    assert port.pending_bytes() == sum(port.pending_bytes(frame.stream_id) for frame in sent)
    assert port.pending_bytes(10) == 200_000 + HEADER.size

    received: list[Frame] = []
    reader = threading.Thread(target=lambda: received.extend(receive_frames(peer, len(sent))))
    reader.start()
    assert port.flush(10.0)
    reader.join()
    assert received == sent
    assert port.pending_bytes() == port.pending_bytes(10) == 0


def test_a_frame_costs_no_more_for_many_that_wait_before_it(pair: tuple[EnginePort, socket.socket]) -> None:
    port, _ = pair

    def send() -> None:
        port.send(FrameKind.MESSAGE, 1, b"a proposal")

    for _ in range(3000):
        send()
    assert port.pending_bytes() > 0
    few_wait = lines_run(send)
    for _ in range(35_000):
        send()
    assert lines_run(send) < 2 * few_wait, "it grows with the frames that wait"


def test_poll_flushes_what_send_kept(pair: tuple[EnginePort, socket.socket]) -> None:
    port, peer = pair
    port.send(FrameKind.MESSAGE, 1, bytes(2_000_000))
    answer = encoded(Frame(FrameKind.SHUTDOWN, 0, b""))

    def read_then_answer() -> None:
        receive_frames(peer, 1)
        peer.sendall(answer)

    reader = threading.Thread(target=read_then_answer)
    reader.start()
    assert port.poll(10.0) == [Frame(FrameKind.SHUTDOWN, 0, b"")]
    reader.join()
    assert port.pending_bytes() == 0


def test_frames_before_the_end_are_delivered_before_peer_gone(
    pair: tuple[EnginePort, socket.socket],
) -> None:
    port, peer = pair
    peer.sendall(encoded(Frame(FrameKind.MESSAGE, 7, b"last")))
    peer.close()

    assert port.poll(None) == [Frame(FrameKind.MESSAGE, 7, b"last")]
    with pytest.raises(PeerGone):
        port.poll(None)


def test_sending_to_a_dead_peer_is_silent_and_poll_tells(pair: tuple[EnginePort, socket.socket]) -> None:
    port, peer = pair
    peer.close()
    for _ in range(3):
        port.send(FrameKind.LOAD, payload=b"x")
    with pytest.raises(PeerGone):
        port.poll(0)
