"""What a target does while a device computes its step. On the real target."""

from __future__ import annotations

import time

import pytest
import torch

from specdec.engine.batch import Batch
from specdec.replica.bridge.frames import Frame, FrameKind
from specdec.target_service.tree.proposed import ReadProposal
from specdec.v1 import common_pb2 as pb
from specdec.v1 import target_pb2
from tests.support.engine.constrained import SCHEMAS, constrained
from tests.support.engine.grammars import json_schema
from tests.support.engine.late_device import LateDevice
from tests.support.engine.local_pair import chain, open_session
from tests.support.engine.overlapping import (
    OTHER,
    PROMPT,
    a_session,
    once,
    tokens_of,
)
from tests.support.engine.worker_client import WorkerClient, reason_of


def test_verdicts_are_sent_while_the_next_step_is_computed(
    client: WorkerClient, device: LateDevice, truth: dict[str, list[int]]
) -> None:
    sent_meanwhile: list[int] = []

    def look() -> None:
        for frame in client.port.outbox:
            if frame.kind is FrameKind.MESSAGE:
                results = target_pb2.VerifyResponse.FromString(frame.payload).results
                sent_meanwhile.extend(token for result in results for token in result.verdict.token_ids)

    device.meanwhile = look
    client.entry("s", open=a_session())
    client.turn()
    assert client.session().num_tokens == 21
    assert tokens_of(client) == []
    client.turn()
    assert sent_meanwhile == truth["s"][20:21]
    assert tokens_of(client) == truth["s"][20:21]


def test_verdicts_are_sent_before_a_step_that_computes_a_prompt_is_launched(
    client: WorkerClient, device: LateDevice, truth: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels are launched one by one."""
    num_sent: list[int] = []

    def launch(batch: Batch) -> object:
        num_sent.append(sum(frame.kind is FrameKind.MESSAGE for frame in client.port.outbox))
        return device.launch(batch)

    client.entry("s", open=a_session())
    client.turn()
    monkeypatch.setattr(client.engine, "launch_pass", launch)
    client.turn()
    client.port.outbox.clear()
    client.entry("other", open=a_session(OTHER))
    client.turn()
    assert num_sent == [0, 1]


def test_a_step_that_is_computed_at_once_is_told_of_before_anything_else_is_done(
    client: WorkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where no GPU is: what was to be done beside it has no time of its own."""
    events: list[str] = []
    poll, send, forward = client.port.poll, client.port.send, client.engine.runner.forward

    def noted_poll(timeout_s: float | None) -> list[Frame]:
        events.append(f"poll {timeout_s}")
        return poll(timeout_s)

    def noted_send(kind: FrameKind, stream_id: int = 0, payload: bytes = b"") -> None:
        if kind is FrameKind.MESSAGE:
            events.append("send")
        send(kind, stream_id, payload)

    def noted_forward(batch: Batch) -> torch.Tensor:
        events.append("forward")
        return forward(batch)

    client.entry("s", open=a_session())
    monkeypatch.setattr(client.engine, "launch_pass", None)
    monkeypatch.setattr(client.engine.runner, "forward", noted_forward)
    monkeypatch.setattr(client.port, "poll", noted_poll)
    monkeypatch.setattr(client.port, "send", noted_send)
    client.turn(3)
    assert events == ["poll 0", "forward", "send"] * 3


def test_what_arrives_is_waited_for_while_a_step_is_computed_and_not_looked_for_all_the_time(
    client: WorkerClient, device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts_s: list[float | None] = []
    poll = client.port.poll

    def noted_poll(timeout_s: float | None) -> list[Frame]:
        timeouts_s.append(timeout_s)
        return poll(timeout_s)

    device.num_looks = lambda: 10
    client.entry("s", open=a_session())
    monkeypatch.setattr(client.port, "poll", noted_poll)
    client.turn()
    assert timeouts_s[:2] == [0, 0]
    assert len(timeouts_s) > 5
    assert all(timeout_s for timeout_s in timeouts_s[2:])


def test_verdicts_are_sent_at_once_where_no_step_follows(client: WorkerClient, truth: dict[str, list[int]]) -> None:
    client.entry("s", open=a_session(body={"credit_position": 21}))
    client.turn()
    assert tokens_of(client) == truth["s"][20:21]


def test_verdicts_are_sent_where_the_next_step_is_held_off(client: WorkerClient, truth: dict[str, list[int]]) -> None:
    client.pair.verifier.steps.pacing._hold_off_ms = 60_000.0
    client.entry("s", open=a_session())
    client.turn()
    assert client.session().num_tokens == 21
    assert tokens_of(client) == truth["s"][20:21]


def test_verdicts_wait_for_the_pass_where_the_draft_is_silent(client: WorkerClient) -> None:
    pacing = client.pair.verifier.steps.pacing
    pacing._hold_off_ms, pacing._num_vain = None, 100
    client.entry("s", open=a_session())
    client.turn()
    assert client.session().num_tokens == 21
    assert tokens_of(client) == []


def test_the_last_verdicts_are_sent_before_the_engine_stops(
    client: WorkerClient, device: LateDevice, truth: dict[str, list[int]]
) -> None:
    device.meanwhile = once(lambda: client.frame(FrameKind.SHUTDOWN), after=2)
    client.entry("s", open=a_session())
    client.worker.run()
    client.turn(0)
    assert tokens_of(client) == truth["s"][20:23]
    client.worker._stopping = False


def test_metrics_know_a_choices_tokens_before_its_owner_sees_the_end(
    client: WorkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, registry, told = client.port.send, client.pair.target_registry, 0

    def check(kind: FrameKind, stream_id: int = 0, payload: bytes = b"") -> None:
        nonlocal told
        if kind is FrameKind.MESSAGE:
            verdicts = [result.verdict for result in target_pb2.VerifyResponse.FromString(payload).results]
            told += sum(len(verdict.token_ids) for verdict in verdicts)
            if any(verdict.finish_reason for verdict in verdicts):
                origins = ("prefill", "draft", "bonus", "decode")
                get = registry.get_sample_value
                counted = sum(get("specdec_target_tokens_total", {"origin": origin}) or 0 for origin in origins)
                assert counted == told
                ended.append(get("specdec_target_step_seconds_count", {"kind": "plain"}))
        send(kind, stream_id, payload)

    ended: list[float | None] = []
    monkeypatch.setattr(client.port, "send", check)
    client.entry("s", open=open_session(PROMPT, max_tokens=10, ignore_eos=True))
    client.turn(12)
    assert told == 10
    assert ended == [9]


def test_gaps_between_passes_that_decode_are_told_of(client: WorkerClient) -> None:
    get = client.pair.target_registry.get_sample_value
    name = "specdec_target_device_gap_seconds"
    before, num_before = get(f"{name}_sum") or 0, get(f"{name}_count") or 0
    client.entry("s", open=a_session())
    client.turn(12)
    client.pair.verifier.load()
    num_gaps = (get(f"{name}_count") or 0) - num_before
    assert num_gaps >= 9  # all but the prompt's, and one that may not have been written yet
    assert (get(f"{name}_sum") or 0) - before == pytest.approx(num_gaps * 1e-3)


def test_proposals_that_arrive_are_read_and_hang_below_the_verdict(
    client: WorkerClient, device: LateDevice, truth: dict[str, list[int]]
) -> None:
    arrived: list[object] = []
    device.meanwhile = once(lambda: client.entry("s", proposal=chain(20, truth["s"][20:26])))
    device.before_compute = lambda batch: arrived.append(client.session().arrived)
    client.entry("s", open=a_session(body={"credit_position": 27}))
    client.turn(4)
    assert isinstance(arrived[0], ReadProposal)
    verdicts = client.take("verdict")
    assert [len(verdict.token_ids) for verdict in verdicts] == [1, 6]
    assert [token for verdict in verdicts for token in verdict.token_ids] == truth["s"][20:27]
    assert verdicts[1].num_accepted == 5


def test_a_bad_proposal_is_answered_as_ever(client: WorkerClient, device: LateDevice) -> None:
    def propose() -> None:
        client.entry("s", proposal=pb.Proposal(start_position=21, token_ids=[1 << 20]).SerializeToString())

    device.meanwhile = once(propose)
    client.entry("s", open=a_session())
    client.turn(3)
    [rejected] = client.take("proposal_rejected")
    assert reason_of(rejected.status) == "INVALID_PROPOSAL"
    assert rejected.expected_position == 21


def test_masks_are_filled_before_the_device_is_done(client: WorkerClient, device: LateDevice) -> None:
    device.before_compute = lambda batch: filled.append(len(client.pair.verifier.steps.masks._shares))
    filled: list[int] = []
    client.pair.verifier.steps.masks._worth_s = float("inf")  # no thread is worth it: as where a GPU computes
    client.entry("s", open=constrained(json_schema(SCHEMAS["record"]), temperature=1.0))
    until_s = time.monotonic() + 60.0
    while not filled and time.monotonic() < until_s:  # until it is compiled
        client.turn()
    client.turn(3)
    assert filled == [1] * len(filled)
    assert len(filled) >= 3


def test_a_step_ends_though_more_and_more_arrives(client: WorkerClient, device: LateDevice) -> None:
    """What is left is taken after it."""
    device.num_looks = lambda: 3

    def flood() -> None:
        for position in range(100):
            client.entry("s", credit=pb.Credit(position=30 + position))

    device.meanwhile = flood
    client.entry("s", open=a_session(body={"credit_position": 21}))
    client.turn()
    assert client.session().num_tokens == 21
    assert client.session().credit_position < 60
    device.meanwhile = lambda: None
    client.turn(2)
    assert client.session().credit_position == 129
