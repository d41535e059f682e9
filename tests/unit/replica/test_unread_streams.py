"""A coordinator that does not read holds up its own sessions, and nobody else's; memory stays bounded meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.rpc import code_pb2

from specdec.replica.bridge.frames import FrameKind
from specdec.replica.worker import owner_streams
from specdec.replica.worker.pending_responses import ResponseLimits
from specdec.v1 import common_pb2 as pb
from tests.support.engine.local_pair import LocalPair, open_session, prompts
from tests.support.engine.worker_client import WorkerClient, reason_of

BUFFER = 64 * 1024
NUM_TOKENS = 300
PROMPT = prompts()[0][:20]


@pytest.fixture(scope="module")
def loaded_pair() -> LocalPair:
    return LocalPair(hold_off_ms=0.0, limits=ResponseLimits(stream_buffer_bytes=BUFFER))


@pytest.fixture
def client(loaded_pair: LocalPair) -> Iterator[WorkerClient]:
    client = WorkerClient(loaded_pair, "target")
    client.attach()
    client.attach(stream_id=2, owner="b")
    yield client
    client.end_all()
    client.check_nothing_held()


def talkative(max_tokens: int = NUM_TOKENS) -> pb.OpenSession:
    """A session with much to tell of each token."""
    return open_session(PROMPT, max_tokens=max_tokens, ignore_eos=True, num_logprobs=20)


def taken(client: WorkerClient, stream_id: int, num_bytes: int) -> None:
    client.frame(FrameKind.STREAM_TAKEN, stream_id, num_bytes.to_bytes(8, "little"))


def tokens(client: WorkerClient, session_id: str) -> list[int]:
    return [token for verdict in client.take("verdict", session_id) for token in verdict.token_ids]


@pytest.fixture(scope="module")
def truth(loaded_pair: LocalPair) -> list[int]:
    client = WorkerClient(loaded_pair, "target")
    client.attach()
    client.entry("s", open=open_session(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True))
    client.turn(NUM_TOKENS + 5)
    return tokens(client, "s")


def test_its_sessions_wait_and_those_of_others_go_on(client: WorkerClient, truth: list[int]) -> None:
    client.entry("s", open=talkative())
    client.entry("t", stream_id=2, open=open_session(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True))
    client.turn(NUM_TOKENS + 5)
    first = tokens(client, "s")
    assert 0 < len(first) < NUM_TOKENS
    assert sum(client.message_bytes) < BUFFER
    assert tokens(client, "t") == truth
    assert client.session("s").seq.paused
    stood = client.session("s").num_tokens
    client.turn(20)
    assert client.session("s").num_tokens == stood
    for _ in range(100):
        taken(client, 1, BUFFER // 8)
        client.turn(5)
    assert first + tokens(client, "s") == truth


def test_a_session_opened_meanwhile_waits_too(client: WorkerClient, truth: list[int]) -> None:
    client.entry("s", open=talkative())
    client.turn(NUM_TOKENS)
    client.entry("u", open=open_session(PROMPT, max_tokens=5, ignore_eos=True))
    client.turn(10)
    assert not tokens(client, "u")
    for _ in range(100):
        taken(client, 1, BUFFER // 8)
        client.turn(5)
    assert tokens(client, "u") == truth[:5]


def test_after_a_while_the_stream_ends_and_its_sessions_can_be_taken_up_on_another(
    client: WorkerClient, truth: list[int]
) -> None:
    client.entry("s", open=talkative())
    client.turn(NUM_TOKENS)
    first = tokens(client, "s")
    assert client.aborts == {}
    client.clock.now_s += 31.0
    client.turn()
    assert client.aborts[1].code == code_pb2.RESOURCE_EXHAUSTED
    assert reason_of(client.aborts[1]) == "STREAM_NOT_READ"
    assert 2 not in client.aborts
    client.attach(stream_id=3, held={"s": (1, len(PROMPT) + len(first))})
    found: list[int] = []
    for _ in range(100):
        taken(client, 3, BUFFER // 8)
        client.turn(5)
        found += tokens(client, "s")
    assert first + found == truth


def test_what_waits_for_one_who_reads_nothing_is_bounded(client: WorkerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_streams, "_MAX_WAITING_BYTES", 16 * BUFFER)
    refused = [client._entry(session_id=f"{n}" + "x" * 400, epoch=1, open=pb.OpenSession()) for n in range(100)]
    for _ in range(100):
        client.send(entries=refused)
        client.turn()
        assert client.host.responses.waiting_bytes(1) <= 20 * BUFFER
        if client.aborts:
            break
    assert reason_of(client.aborts[1]) == "STREAM_NOT_READ"
    assert client.host.responses.waiting_bytes(1) == 0
