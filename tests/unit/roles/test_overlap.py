"""What a target does while a device computes its step, and what happens to sessions meanwhile. On the real target."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from specdec.engine.batch import Batch
from specdec.rpc.bridge.frames import Frame, FrameKind
from specdec.v1 import common_pb2 as pb
from specdec.v1 import target_pb2
from specdec.worker.errors import RankLost
from target_service.tree.speculation_tree import ReadProposal
from tests.support.engine.constrained import SCHEMAS, constrained
from tests.support.engine.grammars import json_schema
from tests.support.engine.late_device import LateDevice, put_on_late_device, unhurried
from tests.support.engine.local_pair import LocalPair, chain, open_session, prompts
from tests.support.engine.worker_client import WorkerClient, reason_of

PROMPT = prompts()[0][:20]
OTHER = prompts()[1][:25]


@pytest.fixture(scope="module")
def loaded() -> tuple[LocalPair, LateDevice]:
    pair = LocalPair(hold_off_ms=0.0, max_sessions=4)
    return pair, put_on_late_device(pair, 240)


@pytest.fixture
def device(loaded: tuple[LocalPair, LateDevice]) -> LateDevice:
    device = loaded[1]
    device.meanwhile, device.before_compute, device.num_looks = lambda: None, lambda batch: None, lambda: 100
    return device


@pytest.fixture
def client(loaded: tuple[LocalPair, LateDevice], device: LateDevice) -> Iterator[WorkerClient]:
    client = WorkerClient(loaded[0], "target")
    client.pair.verifier.pacing.step_time = unhurried()
    client.attach()
    client.turn()
    yield client
    client.end_all()
    client.check_nothing_held()


@pytest.fixture(scope="module")
def truth(loaded: tuple[LocalPair, LateDevice]) -> dict[str, list[int]]:
    """Prompts and greedy continuations, computed at once."""
    pair, device = loaded
    engine = pair.target_built.engine
    engine.launch_pass = None
    pair.reset()
    bodies = {"s": a_session(), "other": a_session(OTHER)}
    outcomes = pair.run(bodies, use_draft=False)
    engine.launch_pass = device.launch
    return {name: [*body.token_ids, *outcomes[name].token_ids] for name, body in bodies.items()}


def a_session(prompt: list[int] = PROMPT, **options: Any) -> pb.OpenSession:
    return open_session(prompt, max_tokens=40, ignore_eos=True, **options)


def once(act: Callable[[], None], *, after: int = 0) -> Callable[[], None]:
    """What happens while one step is computed, after so many others."""
    num_calls = 0

    def meanwhile() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == after + 1:
            act()

    return meanwhile


def tokens_of(client: WorkerClient, session_id: str = "s") -> list[int]:
    return [token for verdict in client.take("verdict", session_id) for token in verdict.token_ids]


# --- what is done meanwhile


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
    client.pair.verifier.pacing._hold_off_ms = 60_000.0
    client.entry("s", open=a_session())
    client.turn()
    client.turn()
    assert client.session().num_tokens == 21
    assert tokens_of(client) == truth["s"][20:21]


def test_the_last_verdicts_are_sent_before_the_engine_stops(
    client: WorkerClient, device: LateDevice, truth: dict[str, list[int]]
) -> None:
    device.meanwhile = once(lambda: client.frame(FrameKind.SHUTDOWN), after=2)
    client.entry("s", open=a_session())
    client.worker.run()
    client.turn(0)
    assert tokens_of(client) == truth["s"][20:23]
    client.worker._stopping = False


def test_metrics_know_a_steps_tokens_before_anybody_is_told_of_them(
    client: WorkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, told = client.port.send, 0

    def check(kind: FrameKind, stream_id: int = 0, payload: bytes = b"") -> None:
        nonlocal told
        if kind is FrameKind.MESSAGE:
            results = target_pb2.VerifyResponse.FromString(payload).results
            told += sum(len(result.verdict.token_ids) for result in results)
            origins = ("prefill", "draft", "bonus", "decode")
            get = client.pair.target_registry.get_sample_value
            counted = sum(get("specdec_target_tokens_total", {"origin": origin}) or 0 for origin in origins)
            assert counted >= told
        send(kind, stream_id, payload)

    monkeypatch.setattr(client.port, "send", check)
    client.entry("s", open=a_session())
    client.turn(12)
    assert told >= 10


def test_gaps_between_passes_that_decode_are_told_of(client: WorkerClient) -> None:
    get = client.pair.target_registry.get_sample_value
    name = "specdec_target_device_gap_seconds"
    before, num_before = get(f"{name}_sum") or 0, get(f"{name}_count") or 0
    client.entry("s", open=a_session())
    client.turn(12)
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
    device.before_compute = lambda batch: filled.append(len(client.pair.verifier._masks._shares))
    filled: list[int] = []
    client.pair.verifier._masks._worth_s = float("inf")  # no thread is worth it: as where a GPU computes
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


# --- what happens to sessions meanwhile


def test_a_session_closed_meanwhile_is_told_nothing_and_holds_nothing(
    client: WorkerClient, device: LateDevice, truth: dict[str, list[int]]
) -> None:
    blocks_used: list[int] = []

    def close() -> None:
        client.entry("s", close=pb.CloseSession(reason="cancelled"))

    device.meanwhile = once(close, after=3)
    device.before_compute = lambda batch: blocks_used.append(client.engine.stats().blocks_used)
    client.entry("s", open=a_session())
    client.entry("other", open=a_session(OTHER))
    client.turn(4)
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
    device.before_compute = lambda batch: names.append(client.pair.verifier.panel.names)
    client.entry("s", open=a_session())
    client.turn(3)
    assert names == [[], [], []]
    client.worker._turn()
    client.port.outbox = [frame for frame in client.port.outbox if frame.stream_id != 1000]
    client.turn(60)
    assert client.pair.verifier.panel.names == ["ngram"]
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
    client.entry("s", open=a_session())
    client.entry("other", open=a_session(OTHER))
    client.turn(4)
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
        raise RankLost("rank 1 was killed by SIGKILL")

    client.entry("s", open=a_session())
    client.turn(3)
    device.before_compute = lost
    with pytest.raises(RankLost):
        client.turn()
    client.engine.abandon_step()
