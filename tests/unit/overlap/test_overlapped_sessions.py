"""What happens to sessions while a device computes their step, and passes that raise. On the real target."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specdec.engine.batch import Batch
from specdec.replica.bridge.frames import FrameKind
from specdec.v1 import common_pb2 as pb
from specdec.v1 import target_pb2
from tests.support.engine.late_device import LateDevice
from tests.support.engine.overlapping import (
    OTHER,
    PROMPT,
    a_session,
    once,
    tokens_of,
)
from tests.support.engine.worker_client import WorkerClient, reason_of


def open_both(client: WorkerClient) -> None:
    """Sessions s and other, which have their first tokens."""
    client.entry("s", open=a_session())
    client.entry("other", open=a_session(OTHER))
    client.turn(4)


def test_a_session_closed_meanwhile_is_told_nothing_and_holds_nothing(
    client: WorkerClient, device: LateDevice, truth: dict[str, list[int]]
) -> None:
    blocks_used: list[int] = []

    def close() -> None:
        client.entry("s", close=pb.CloseSession(reason="cancelled"))

    device.meanwhile = once(close, after=3)
    device.before_compute = lambda batch: blocks_used.append(client.engine.stats().blocks_used)
    open_both(client)
    assert client.session() is None
    assert blocks_used[3] == blocks_used[2], "its blocks were given back while they were written"
    assert client.engine.stats().blocks_used < blocks_used[3]
    client.turn(60)
    assert tokens_of(client) == truth["s"][20:23]
    assert tokens_of(client, "other") == truth["other"][25:]


def test_a_session_opened_again_meanwhile_goes_on_from_its_tokens(
    client: WorkerClient, device: LateDevice, truth: dict[str, list[int]]
) -> None:
    def reopen() -> None:
        body = a_session()
        body.token_ids[:] = truth["s"][:22]
        client.entry("s", 2, open=body)

    device.meanwhile = once(reopen, after=3)
    client.entry("s", open=a_session())
    client.turn(60)
    verdicts = [(result.epoch, result.verdict) for result in client.results if result.WhichOneof("result") == "verdict"]
    assert [token for epoch, verdict in verdicts if epoch == 1 for token in verdict.token_ids] == truth["s"][20:23]
    assert [token for epoch, verdict in verdicts if epoch == 2 for token in verdict.token_ids] == truth["s"][22:]


def test_a_fork_of_a_prompt_that_is_being_computed_gets_its_first_token_of_that_step(
    client: WorkerClient, device: LateDevice, truth: dict[str, list[int]]
) -> None:
    device.meanwhile = once(lambda: client.entry("f", open=a_session(body={"fork_from": "s"})))
    client.entry("s", open=a_session())
    client.turn()
    assert client.session("f").num_tokens == 21
    client.turn(60)
    assert tokens_of(client, "f") == truth["s"][20:]
    assert tokens_of(client) == truth["s"][20:]


def test_forks_whose_parent_is_closed_meanwhile_start_on_their_own(
    client: WorkerClient, device: LateDevice, truth: dict[str, list[int]]
) -> None:
    def act() -> None:
        client.entry("f", open=a_session(body={"fork_from": "s"}))
        client.entry("s", close=pb.CloseSession(reason="cancelled"))

    device.meanwhile = once(act)
    client.entry("s", open=a_session())
    client.turn(60)
    assert tokens_of(client) == []
    assert tokens_of(client, "f") == truth["s"][20:]


def test_a_session_whose_stream_breaks_meanwhile_is_told_again_what_it_missed(
    client: WorkerClient, device: LateDevice, truth: dict[str, list[int]]
) -> None:
    device.meanwhile = once(lambda: client.frame(FrameKind.STREAM_CLOSED), after=2)
    client.entry("s", open=a_session())
    client.turn(6)
    assert client.session().num_tokens == 23, "without an owner it takes part in no step"
    seen = 20 + len(tokens_of(client))
    client.attach(stream_id=2, held={"s": (1, seen)})
    client.turn(60)
    assert tokens_of(client) == truth["s"][seen:]


def test_drafters_that_are_set_meanwhile_are_set_when_the_step_is_over(
    client: WorkerClient, device: LateDevice, truth: dict[str, list[int]]
) -> None:
    names: list[list[str]] = []

    def swap() -> None:
        request = target_pb2.SetDraftersRequest(drafters="ngram").SerializeToString()
        client.frame(FrameKind.CALL, 1000, request)
        client.entry("s", credit=pb.Credit(position=70))

    device.meanwhile = once(swap, after=2)
    device.before_compute = lambda batch: names.append(client.pair.verifier.local_drafters.names)
    client.entry("s", open=a_session())
    client.turn(3)
    assert names == [[], [], []]
    client.worker._turn()
    client.port.outbox = [frame for frame in client.port.outbox if frame.stream_id != 1000]
    client.turn(60)
    assert client.pair.verifier.local_drafters.names == ["ngram"]
    assert names[3] == ["ngram"]
    assert tokens_of(client) == truth["s"][20:]


def test_a_replica_that_drains_meanwhile_ends_its_sessions_first(
    client: WorkerClient, device: LateDevice, truth: dict[str, list[int]]
) -> None:
    device.meanwhile = once(lambda: client.frame(FrameKind.DRAIN), after=2)
    client.entry("s", open=a_session())
    client.turn(30)
    assert FrameKind.DRAINED not in client.kinds
    client.turn(30)
    assert FrameKind.DRAINED in client.kinds
    assert tokens_of(client) == truth["s"][20:]


# --- passes that raise


def raise_for(token: int) -> Callable[[Batch], None]:
    def raising(batch: Batch) -> None:
        if token in batch.input_ids.tolist():
            raise ValueError("poison")

    return raising


def test_a_pass_that_raises_for_one_session_costs_the_others_nothing(
    client: WorkerClient, device: LateDevice, truth: dict[str, list[int]]
) -> None:
    poison = 4000
    assert poison not in {*truth["s"], *truth["other"]}
    device.before_compute = raise_for(poison)
    open_both(client)
    client.entry("guilty", open=a_session([*PROMPT, poison]))
    client.turn(80)
    [error] = client.take("error", "guilty")
    assert reason_of(error.status) == "SESSION_FAULT"
    assert tokens_of(client) == truth["s"][20:]
    assert tokens_of(client, "other") == truth["other"][25:]


def test_nobody_is_blamed_for_a_pass_of_a_session_that_was_closed_meanwhile(
    client: WorkerClient, device: LateDevice, truth: dict[str, list[int]]
) -> None:
    poison = 4000
    device.before_compute = raise_for(poison)
    client.entry("s", open=a_session())
    client.turn(4)
    device.meanwhile = once(lambda: client.entry("guilty", close=pb.CloseSession(reason="cancelled")))
    client.entry("guilty", open=a_session([*PROMPT, poison]))
    client.turn(80)
    assert client.take("error", "guilty") == client.take("error") == []
    assert tokens_of(client) == truth["s"][20:]


def test_what_is_the_engines_own_ends_it(client: WorkerClient, device: LateDevice) -> None:
    def lost(_batch: Batch) -> None:
        raise MemoryError

    client.entry("s", open=a_session())
    client.turn(3)
    device.before_compute = lost
    with pytest.raises(MemoryError):
        client.turn()
    client.engine.abandon_step()
