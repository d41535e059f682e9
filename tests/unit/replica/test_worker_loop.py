"""The loop of an engine process: streams, owners, epochs, leases, orphans, draining. On the real target."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.rpc import code_pb2

from specdec.replica.bridge.frames import FrameKind
from specdec.replica.worker.loop import EngineWorker
from specdec.replica.worker.sessions import EngineSession, EngineSessionTable, Owner
from specdec.v1 import common_pb2 as pb
from tests.support.engine.local_pair import LocalPair, open_session, prompts
from tests.support.engine.worker_client import WorkerClient, reason_of

PROMPT_LEN = 20


@pytest.fixture(scope="module")
def loaded_pair() -> LocalPair:
    return LocalPair(hold_off_ms=0.0)


@pytest.fixture
def client(loaded_pair: LocalPair) -> Iterator[WorkerClient]:
    client = WorkerClient(loaded_pair, "target")
    yield client
    client.end_all()
    client.check_nothing_held()


def a_session(max_tokens: int = 100, **body: object) -> pb.OpenSession:
    return open_session(prompts()[0][:PROMPT_LEN], max_tokens=max_tokens, ignore_eos=True, body=body)


def opened(client: WorkerClient, **body: object) -> WorkerClient:
    client.attach()
    client.entry("s", open=a_session(**body))
    client.turn(3)
    return client


def test_attaching_is_answered_with_the_identity_and_what_is_not_held(client: WorkerClient) -> None:
    client.attach(held={"gone": (1, 7)})
    client.turn()
    assert client.attached[0].identity.name == "target"
    assert client.attached[0].unknown_session_ids == ["gone"]


def test_a_stream_that_does_not_begin_with_attach_is_aborted(client: WorkerClient) -> None:
    client.entry("s", open=a_session())
    client.turn()
    assert client.aborts[1].code == code_pb2.FAILED_PRECONDITION
    assert reason_of(client.aborts[1]) == "NOT_ATTACHED"
    assert client.session() is None


def test_attaching_twice_on_one_stream_aborts_it(client: WorkerClient) -> None:
    client.attach()
    client.attach(owner="b")
    client.turn()
    assert reason_of(client.aborts[1]) == "ALREADY_ATTACHED"


def test_a_message_that_does_not_parse_aborts_its_stream_only(client: WorkerClient) -> None:
    opened(client)
    client.attach(stream_id=2, owner="b")
    client.frame(FrameKind.MESSAGE, 2, b"\xff\xff\xff")
    client.turn()
    assert list(client.aborts) == [2]
    assert client.aborts[2].code == code_pb2.INVALID_ARGUMENT
    assert client.session() is not None


def test_a_stream_whose_responses_pile_up_is_aborted(client: WorkerClient) -> None:
    opened(client)
    client.port.num_pending_bytes = 1 << 30
    client.entry("s", credit=pb.Credit(position=50))
    client.turn()
    assert client.aborts[1].code == code_pb2.RESOURCE_EXHAUSTED


def test_opening_tells_the_position_and_tokens_follow(client: WorkerClient) -> None:
    opened(client)
    assert [o.position for o in client.take("opened")] == [PROMPT_LEN]
    verdicts = client.take("verdict")
    assert [v.start_position for v in verdicts] == list(range(PROMPT_LEN, PROMPT_LEN + len(verdicts)))


def test_entries_of_another_epoch_of_unknown_sessions_or_without_a_body_are_dropped(client: WorkerClient) -> None:
    opened(client)
    client.entry("s", epoch=2, close=pb.CloseSession())
    client.entry("s", epoch=0, proposal=b"\xff")
    client.entry("nobody", close=pb.CloseSession())
    client.entry("s")
    client.turn()
    assert client.session() is not None
    assert not client.take("proposal_rejected")
    assert not client.take("error")
    assert not client.aborts


def test_sessions_of_another_owner_are_out_of_reach(client: WorkerClient) -> None:
    opened(client)
    client.attach(stream_id=2, owner="b")
    client.entry("s", stream_id=2, close=pb.CloseSession())
    client.turn()
    assert client.session().owner.owner_id == "a"


def test_a_repeated_open_is_dropped_and_a_higher_epoch_replaces_the_session(client: WorkerClient) -> None:
    opened(client)
    before = client.session()
    client.take("opened")
    client.entry("s", epoch=1, open=a_session())
    client.turn()
    assert client.session() is before
    assert not client.take("opened")

    client.entry("s", epoch=2, open=a_session())
    client.turn()
    assert client.session().epoch == 2
    assert client.session() is not before
    assert [o.position for o in client.take("opened")] == [PROMPT_LEN]


def test_an_invalid_open_is_an_error_of_the_session_and_names_the_field(client: WorkerClient) -> None:
    client.attach()
    body = a_session()
    body.sampling.top_p = 0.0
    client.entry("s", open=body)
    client.entry("t", open=a_session())
    client.turn()
    (error,) = client.take("error")
    assert error.status.code == code_pb2.INVALID_ARGUMENT
    assert "open.sampling.top_p" in error.status.message
    assert client.session("t") is not None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", -0.1),
        ("top_p", 1.5),
        ("min_p", -1.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("inf")),
        ("max_tokens", 0),
    ],
)
def test_sampling_out_of_range_is_refused(client: WorkerClient, field: str, value: float) -> None:
    client.attach()
    body = a_session()
    setattr(body.sampling, field, value)
    client.entry("s", open=body)
    client.turn()
    assert f"open.sampling.{field}" in client.take("error")[0].status.message


def test_ids_outside_the_vocabulary_and_overlong_prompts_are_refused(client: WorkerClient) -> None:
    client.attach()
    for tokens in ([], [1, 4096], [1] * 2048):
        client.entry("s", open=open_session(tokens))
        client.turn()
        assert "open." in client.take("error")[0].status.message


def test_a_broken_stream_pauses_its_sessions_and_attaching_resends_what_was_not_seen(client: WorkerClient) -> None:
    opened(client)
    seen = client.take("verdict")
    client.frame(FrameKind.STREAM_CLOSED)
    client.turn(5)
    held = client.session().num_tokens
    assert not client.take("verdict")
    client.turn(5)
    assert client.session().num_tokens == held

    committed = PROMPT_LEN + 1
    client.attach(stream_id=2, held={"s": (1, committed)})
    client.turn()
    resent = client.take("verdict")
    assert resent[: len(seen) - 1] == seen[1:]
    assert resent[0].start_position == committed
    client.turn()
    assert client.session().num_tokens > held


def test_acknowledged_verdicts_are_not_kept(client: WorkerClient) -> None:
    opened(client)
    position = client.session().num_tokens
    client.entry("s", credit=pb.Credit(position=0, acknowledged_position=position))
    client.frame(FrameKind.STREAM_CLOSED)
    client.turn()
    client.take("verdict")
    client.attach(stream_id=2, held={"s": (1, PROMPT_LEN)})
    client.turn()
    assert all(verdict.start_position >= position for verdict in client.take("verdict"))


def test_attaching_frees_sessions_that_are_not_listed_or_of_another_epoch(client: WorkerClient) -> None:
    client.attach()
    for session_id in ("s", "t", "u"):
        client.entry(session_id, open=a_session())
    client.turn(2)
    client.attach(stream_id=2, held={"s": (1, PROMPT_LEN), "t": (7, PROMPT_LEN)})
    client.turn()
    assert client.session("s") is not None
    assert client.session("t") is None
    assert client.session("u") is None
    assert client.attached[-1].unknown_session_ids == ["t"]
    assert reason_of(client.aborts[1]) == "OWNER_REPLACED"


def test_a_stream_under_an_older_lease_is_refused_and_the_owner_keeps_its_own(client: WorkerClient) -> None:
    client.attach(lease=5)
    client.entry("s", open=a_session())
    client.attach(stream_id=2, lease=4)
    client.turn()
    assert list(client.aborts) == [2]
    assert reason_of(client.aborts[2]) == "STALE_LEASE"
    assert client.session() is not None


def test_the_end_of_a_stream_that_was_replaced_pauses_nothing(client: WorkerClient) -> None:
    opened(client)
    client.attach(stream_id=2, held={"s": (1, PROMPT_LEN)})
    client.frame(FrameKind.STREAM_CLOSED, 1)
    client.turn()
    assert not client.session().seq.paused


def test_an_orphan_is_freed_after_its_time_to_live(client: WorkerClient) -> None:
    opened(client)
    client.frame(FrameKind.STREAM_CLOSED)
    client.turn()
    client.clock.now_s += 59.9
    client.turn()
    assert client.session() is not None
    client.clock.now_s += 0.2
    client.turn()
    client.check_nothing_held()


@pytest.mark.parametrize("is_orphan", [False, True])
def test_a_session_that_is_not_closed_at_its_deadline_is_ended(client: WorkerClient, is_orphan: bool) -> None:
    client.attach()
    client.entry("s", open=a_session(deadline_ms=2_000))
    client.entry("t", open=a_session())
    client.turn(3)
    if is_orphan:
        client.frame(FrameKind.STREAM_CLOSED)
    client.clock.now_s += 2.9  # the deadline has passed, the time for the owner to act has not
    client.turn()
    assert client.session("s") is not None
    client.clock.now_s += 0.2
    client.turn()
    assert client.session("s") is None
    assert client.session("t") is not None
    errors = client.take("error")
    assert [error.status.code for error in errors] == ([] if is_orphan else [code_pb2.DEADLINE_EXCEEDED])


def test_an_idle_worker_wakes_up_for_a_deadline() -> None:
    owner = Owner("a", 0, 1)
    table = EngineSessionTable(session_ttl_s=60.0)
    table.add(EngineSession(session_id="s", epoch=1, owner=owner, deadline_s=100.0))
    assert table.next_expiry_s() == 101.0
    table.add(EngineSession(session_id="t", epoch=1, owner=owner, orphaned_at_s=30.0))
    assert table.next_expiry_s() == 90.0


def test_draining_is_reported_once_no_session_is_left(client: WorkerClient) -> None:
    opened(client)
    client.frame(FrameKind.DRAIN)
    client.turn()
    assert FrameKind.DRAINED not in client.kinds
    client.entry("s", close=pb.CloseSession())
    client.turn(3)
    assert client.kinds.count(FrameKind.DRAINED) == 1


def test_shutdown_ends_the_loop(client: WorkerClient) -> None:
    client.frame(FrameKind.SHUTDOWN)
    client.worker.run()


def test_load_is_reported_a_few_times_a_second(client: WorkerClient) -> None:
    client.turn(10)
    assert client.kinds.count(FrameKind.LOAD) == 1
    client.clock.now_s += 0.3
    client.turn(10)
    assert client.kinds.count(FrameKind.LOAD) == 2


def test_every_owner_is_told_of_a_load_that_changed_and_of_no_other(client: WorkerClient) -> None:
    client.attach(stream_id=2, owner="b")
    opened(client)
    client.clock.now_s += 0.3
    client.turn()
    assert [client.loads[stream_id].num_running for stream_id in (1, 2)] == [1, 1]
    client.entry("s", close=pb.CloseSession())
    client.clock.now_s += 0.3
    client.turn()
    assert [client.loads[stream_id].num_running for stream_id in (1, 2)] == [0, 0]
    client.loads.clear()
    client.clock.now_s += 0.3
    client.turn()
    assert client.loads == {}


def test_one_step_of_many_sessions_costs_one_message(client: WorkerClient) -> None:
    client.attach()
    for i in range(6):
        client.entry(f"s{i}", open=a_session())
    client.turn(3)
    client.kinds.clear()
    client.turn()
    assert client.kinds.count(FrameKind.MESSAGE) == 1
    assert len({result.session_id for result in client.results}) == 6


@pytest.mark.parametrize("lease", [3, 4])
def test_another_owner_without_a_higher_lease_cannot_take_a_session_over(client: WorkerClient, lease: int) -> None:
    opened(client, lease_generation=4)
    client.attach(stream_id=2, owner="b")
    client.entry("s", epoch=9, stream_id=2, open=a_session(lease_generation=lease))
    client.turn()
    assert reason_of(client.take("error")[0].status) == "STALE_LEASE"
    assert client.session().owner.owner_id == "a"


def test_another_owner_with_a_higher_lease_takes_a_session_over_and_the_former_is_told(client: WorkerClient) -> None:
    opened(client, lease_generation=4)
    client.attach(stream_id=2, owner="b")
    client.entry("s", epoch=1, stream_id=2, open=a_session(lease_generation=5))
    client.turn()
    assert reason_of(client.take("error")[0].status) == "SESSION_TAKEN_OVER"
    assert client.session().owner.owner_id == "b"


def test_the_same_owner_cannot_reopen_under_a_lower_lease(client: WorkerClient) -> None:
    opened(client, lease_generation=4)
    client.entry("s", epoch=2, open=a_session(lease_generation=3))
    client.turn()
    assert reason_of(client.take("error")[0].status) == "STALE_LEASE"
    assert client.session().epoch == 1


def test_a_message_of_ever_so_many_entries_holds_up_nobodys_steps(client: WorkerClient) -> None:
    """One of 16 MB may hold a million: as one turn they would take longer than an engine may stand still."""
    client.worker.most_taking_s = EngineWorker.most_taking_s
    opened(client)
    client.attach(stream_id=2, owner="b")
    client.turn()
    refused = [client._entry(session_id=f"b{number}", epoch=1, open=pb.OpenSession()) for number in range(20_000)]
    client.send(2, entries=refused)
    num_turns = num_tokens = num_refused = 0
    while num_refused < len(refused):
        client.worker._turn()
        client.turn(0)
        num_turns += 1
        num_refused = sum(result.WhichOneof("result") == "error" for result in client.results)
        num_tokens += sum(len(verdict.token_ids) for verdict in client.take("verdict"))
    assert num_turns > 1
    assert num_tokens >= num_turns


def test_the_rest_of_a_message_is_dropped_when_its_stream_is_cut_off(client: WorkerClient) -> None:
    opened(client)
    client.attach(stream_id=2, owner="b")
    long_id = client._entry(session_id="x" * 513, epoch=1, open=a_session())
    client.send(2, entries=[long_id, client._entry(session_id="t", epoch=1, open=a_session())])
    client.turn(2)
    assert reason_of(client.aborts[2]) == "MALFORMED_MESSAGE"
    assert client.session("t") is None
    assert client.session() is not None


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_frame_of_too_many_parts_ends_its_stream_before_it_is_parsed(role: str, loaded_pair: LocalPair) -> None:
    client = WorkerClient(loaded_pair, role)
    opened(client)
    empty_entry = b"\x12\0"
    assert len(client.wire.request.FromString(empty_entry).entries) == 1
    for stream_id, payload in ((2, empty_entry * 200_000), (3, b"\x12\x80\x80\x40" + b"\x0a\0" * 2**19)):
        client.attach(stream_id, owner=f"b{stream_id}")
        client.frame(FrameKind.MESSAGE, stream_id, payload)
        client.turn()
        assert reason_of(client.aborts[stream_id]) == "MALFORMED_MESSAGE"
        assert client.aborts[stream_id].message.startswith("entries")
    assert client.session() is not None
    client.end_all()


def test_an_owner_whose_id_is_too_long_is_not_attached(client: WorkerClient) -> None:
    client.attach(owner="o" * 513)
    client.turn()
    assert reason_of(client.aborts[1]) == "MALFORMED_MESSAGE"
    assert not client.attached
