"""What waits for coordinators leaves in order, in messages that they take, and no faster than they read."""

from __future__ import annotations

from google.rpc import code_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.replica.bridge.frames import FrameKind, report_unit
from specdec.replica.worker.pending_responses import PendingResponses, ResponseLimits, TooLarge
from specdec.v1 import common_pb2 as pb
from specdec.v1 import target_pb2
from specdec.wire.message_sizes import MIN_MESSAGE_BYTES, most_entry_bytes
from tests.support.engine.list_port import TARGET_WIRE, ListPort

LIMITS = ResponseLimits(max_message_bytes=2**20, stream_buffer_bytes=2**20)
MOST = most_entry_bytes(MIN_MESSAGE_BYTES)
STREAM = 7


def make(limits: ResponseLimits = LIMITS) -> tuple[PendingResponses, ListPort]:
    port = ListPort()
    return PendingResponses(port, TARGET_WIRE, limits), port  # type: ignore[arg-type]


def rejected(num_bytes: int) -> pb.ProposalRejected:
    """A result of about so many bytes."""
    rejection = pb.ProposalRejected()
    rejection.status.message = "x" * num_bytes
    return rejection


def messages(port: ListPort) -> list[target_pb2.VerifyResponse]:
    return [
        target_pb2.VerifyResponse.FromString(frame.payload) for frame in port.outbox if frame.kind is FrameKind.MESSAGE
    ]


def told(port: ListPort) -> list[tuple[str, int]]:
    """Session and size of each result, in the order in which they left."""
    return [
        (result.session_id, len(result.proposal_rejected.status.message))
        for message in messages(port)
        for result in message.results
    ]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, MOST - 100)), max_size=15), st.booleans())
def test_any_results_leave_in_order_in_messages_that_the_coordinator_takes(
    results: list[tuple[str, int]], has_attached: bool
) -> None:
    responses, port = make(ResponseLimits(max_message_bytes=2**20, stream_buffer_bytes=2**30))
    responses.opened(STREAM, MIN_MESSAGE_BYTES)
    if has_attached:
        responses.attached(STREAM, pb.Attached(unknown_session_ids=["z"]))
    for session_id, size in results:
        responses.add(STREAM, session_id, 1, proposal_rejected=rejected(size))
    load = pb.LoadReport(num_running=3)
    assert responses.flush([STREAM], 0.0, load, load) == []
    assert told(port) == results
    assert all(len(frame.payload) <= MIN_MESSAGE_BYTES for frame in port.outbox)
    first = messages(port)[0]
    assert first.HasField("load")
    assert first.HasField("attached") == has_attached


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0, 1000, MOST, 2 * MOST])), max_size=12))
def test_a_result_that_no_message_holds_is_told_and_nothing_of_its_session_follows(
    results: list[tuple[str, int]],
) -> None:
    responses, port = make(ResponseLimits(max_message_bytes=2**20, stream_buffer_bytes=2**30))
    responses.opened(STREAM, MIN_MESSAGE_BYTES)
    for session_id, size in results:
        responses.add(STREAM, session_id, 1, proposal_rejected=rejected(size))
    too_large = responses.flush([STREAM], 0.0, None)
    firsts: dict[str, int] = {}
    for index, (session_id, size) in enumerate(results):
        if size >= MOST:
            firsts.setdefault(session_id, index)
    if sum(size for _, size in results) < MOST:
        assert not firsts
    assert {(each.session_id, each.most_bytes) for each in too_large} == {(name, MOST) for name in firsts}
    kept = [entry for index, entry in enumerate(results) if index < firsts.get(entry[0], len(results))]
    assert told(port) == kept
    assert all(len(frame.payload) <= MIN_MESSAGE_BYTES for frame in port.outbox)


def test_small_results_of_all_sessions_leave_in_one_message() -> None:
    responses, port = make()
    for name in "abc":
        responses.add(STREAM, name, 1, proposal_rejected=rejected(10))
    responses.flush([STREAM], 0.0, None)
    assert len(port.outbox) == 1


def test_a_coordinator_that_does_not_tell_takes_what_we_take() -> None:
    responses, port = make()
    assert responses.opened(STREAM, 0) == LIMITS.max_message_bytes
    responses.add(STREAM, "a", 1, proposal_rejected=rejected(2 * MIN_MESSAGE_BYTES))
    assert responses.flush([STREAM], 0.0, None) == []
    assert len(port.outbox) == 1


def test_a_stream_that_is_not_read_is_full_and_goes_on_in_order_when_it_is() -> None:
    responses, port = make()
    sizes = [60_000 + index for index in range(30)]
    for size in sizes:
        responses.add(STREAM, "a", 1, proposal_rejected=rejected(size))
        responses.flush([STREAM], 5.0, None)
    handed_out = sum(len(frame.payload) for frame in port.outbox)
    assert handed_out <= LIMITS.stream_buffer_bytes // 2 + 61_000
    assert responses.full == {STREAM}
    unit = report_unit(LIMITS.stream_buffer_bytes)
    num_told = 0
    while responses.full:
        num_told += 1
        responses.taken(STREAM, unit, 6.0)
        assert num_told < 100
    assert [size for _, size in told(port)] == sizes


def test_other_streams_are_not_held_up_by_a_full_one() -> None:
    responses, port = make()
    for _ in range(30):
        responses.add(STREAM, "a", 1, proposal_rejected=rejected(60_000))
    responses.add(8, "b", 1, proposal_rejected=rejected(60_000))
    responses.flush([STREAM, 8], 0.0, None)
    assert responses.full == {STREAM}
    assert [frame.stream_id for frame in port.outbox].count(8) == 1


def test_what_the_servicer_has_not_told_yet_holds_nothing_up() -> None:
    """It tells in units: with less than one outstanding it may have nothing left to tell."""
    limits = ResponseLimits(max_message_bytes=2**20, stream_buffer_bytes=MIN_MESSAGE_BYTES)
    responses, port = make(limits)
    responses.add(STREAM, "a", 1, proposal_rejected=rejected(report_unit(MIN_MESSAGE_BYTES) - 100))
    responses.flush([STREAM], 0.0, None)
    responses.add(STREAM, "a", 1, proposal_rejected=rejected(500_000))
    responses.flush([STREAM], 0.0, None)
    assert len(port.outbox) == 2
    assert responses.full == set()


def test_a_full_stream_of_which_nothing_is_taken_is_not_read() -> None:
    responses, _ = make()
    for _ in range(30):
        responses.add(STREAM, "a", 1, proposal_rejected=rejected(60_000))
    responses.flush([STREAM], 100.0, None)
    assert responses.not_read(129.9, 30.0) == []
    assert responses.not_read(130.0, 30.0) == [STREAM]
    responses.taken(STREAM, 1, 120.0)
    assert responses.not_read(130.0, 30.0) == []


def test_what_waits_for_a_stream_that_ends_is_forgotten() -> None:
    responses, port = make()
    for _ in range(30):
        responses.add(STREAM, "a", 1, proposal_rejected=rejected(60_000))
    responses.flush([STREAM], 0.0, None)
    responses.abort(STREAM, code_pb2.ABORTED, "OWNER_REPLACED", "the owner attached on another stream")
    assert responses.full == set()
    port.outbox.clear()
    responses.taken(STREAM, 2**20, 0.0)
    assert port.outbox == []
    assert responses.streams == set()


def test_the_one_that_is_too_large_is_named_with_both_sizes() -> None:
    responses, _ = make()
    responses.opened(STREAM, MIN_MESSAGE_BYTES)
    responses.add(STREAM, "a", 4, proposal_rejected=rejected(MIN_MESSAGE_BYTES))
    [each] = responses.flush([STREAM], 0.0, None)
    assert isinstance(each, TooLarge)
    assert (each.stream_id, each.session_id, each.epoch, each.most_bytes) == (STREAM, "a", 4, MOST)
    assert each.num_bytes > MIN_MESSAGE_BYTES
