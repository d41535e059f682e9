"""A direct link between draft and target: what it carries, and what each of its failures does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from google.rpc import code_pb2

from specdec.replica.bridge.frame_codec import FrameKind
from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2, target_pb2
from specdec.wire.proposals import MOST_PROPOSALS
from tests.protocol.linked_pair import EPOCH, KEY, PROMPT, LinkedPair, linked_pair
from tests.protocol.simulation.model import reference
from tests.support.for_each import for_each

pytestmark = pytest.mark.smoke
MAX_TOKENS = 40


@pytest.fixture
def pair() -> Iterator[LinkedPair]:
    with linked_pair() as made:
        yield made


def joined(pair: LinkedPair, **options: object) -> LinkedPair:
    pair.open(**options)  # type: ignore[arg-type]
    pair.grant()
    pair.turn(3)
    assert pair.states[-1].is_direct
    return pair


def expected(temperature: float = 1.0) -> list[int]:
    with linked_pair() as plain:
        plain.relays = False
        plain.open(temperature=temperature)
        return plain.run()


def kinds(pair: LinkedPair) -> set[str | None]:
    return {entry.WhichOneof("entry") for entry in pair.carried}


def check_relayed_to_the_end(pair: LinkedPair, reason: str) -> None:
    """The session goes on by way of the coordinator: proposals are verified, and no token changes."""
    assert not pair.states[-1].is_direct
    assert reason in pair.states[-1].reason
    before = len(pair.relayed)
    assert pair.run() == expected()
    assert len(pair.relayed) > before
    assert not pair.errors


@for_each("temperature", (0.0, 1.0))
def test_tokens_and_proposals_of_a_joined_session_need_no_coordinator(temperature: float) -> None:
    with linked_pair() as pair:
        joined(pair, temperature=temperature)
        pair.relays, num_relayed = False, len(pair.relayed)
        assert pair.run() == expected(temperature)
        assert len(pair.relayed) == num_relayed
        accepted = sum(verdict.num_accepted for verdict in pair.verdicts[4:])
        assert accepted > 5
        assert all(verdict.HasField("linked") for verdict in pair.verdicts[4:-1])
        assert {verdict.linked.epoch for verdict in pair.verdicts[4:-1]} == {EPOCH}
        assert pair.verdicts[-2].linked.position > len(PROMPT)


def test_rejection_sampling_gives_the_same_tokens_on_both_ways() -> None:
    outputs = []
    for is_linked in (True, False):
        with linked_pair() as pair:
            pair.open(rejection=True)
            if is_linked:
                pair.grant()
            outputs.append(pair.run())
            assert sum(verdict.num_accepted for verdict in pair.verdicts) > 3
            assert any(verdict.HasField("linked") for verdict in pair.verdicts) == is_linked
    assert outputs[0] == outputs[1]


@for_each(
    "target_key, draft_key, epoch",
    ((KEY, bytes(16), EPOCH), (KEY, KEY, EPOCH + 1), (KEY[:15], KEY[:15], EPOCH), (b"", KEY, EPOCH)),
)
def test_a_draft_without_the_sessions_grant_cannot_join_it(target_key: bytes, draft_key: bytes, epoch: int) -> None:
    with linked_pair() as pair:
        pair.open()
        pair.grant(target_key, draft_key, epoch)
        assert pair.run() == expected()
        assert not any(state.is_direct for state in pair.states)
        assert "commit" not in kinds(pair)
        assert not any(verdict.HasField("linked") for verdict in pair.verdicts)


def test_a_grant_that_reaches_the_draft_first_is_used_later(pair: LinkedPair) -> None:
    pair.open()
    pair.tell_draft(link=pb.LinkGrant(key=KEY, epoch=EPOCH, target="target:1"))
    pair.turn(4)
    assert not any(state.is_direct for state in pair.states)
    pair.tell_target(link=pb.LinkGrant(key=KEY, epoch=EPOCH))
    for _ in range(8):
        pair.loop.skip(0.2)
        pair.turn()
    assert pair.states[-1].is_direct
    assert pair.run() == expected()


def test_a_link_that_ends_gives_way_to_the_relay_at_once_and_is_dialled_again(pair: LinkedPair) -> None:
    joined(pair)
    pair.cut()
    pair.turn(2)
    assert not pair.states[-1].is_direct
    assert "cut" in pair.states[-1].reason
    for _ in range(4):
        pair.loop.skip(1.0)
        pair.turn()
    assert pair.states[-1].is_direct
    assert pair.run() == expected()


def test_a_link_that_loses_a_commit_is_left(pair: LinkedPair) -> None:
    joined(pair)
    pair.to_draft = lambda frame: None
    pair.turn()
    pair.to_draft = lambda frame: frame
    pair.turn(2)
    check_relayed_to_the_end(pair, "lost a commit")


def test_a_link_that_is_slower_than_the_relay_is_left(pair: LinkedPair) -> None:
    joined(pair)
    pair.to_draft = lambda frame: None
    for _ in range(4):
        start = len(pair.tokens)
        pair.turn()
        pair.tell_draft(commit=pb.Commit(start_position=start, token_ids=pair.tokens[start:]))
    pair.turn()
    check_relayed_to_the_end(pair, "relayed commits arrive first")


def test_tokens_on_a_link_that_contradict_the_drafts_are_refused(pair: LinkedPair) -> None:
    joined(pair)
    position = len(pair.tokens)
    wrong = [(pair.tokens[-1] + 1) % 20 + 5]
    lie = pb.Commit(start_position=position - 1, token_ids=wrong)
    pair.send(pair.draft, pb.LinkEntry(session_id="s", epoch=EPOCH, commit=lie))
    pair.turn(2)
    check_relayed_to_the_end(pair, "were refused")


def test_commits_on_both_ways_are_taken_once(pair: LinkedPair) -> None:
    joined(pair)
    while not pair.is_over:
        start = len(pair.tokens)
        pair.turn()
        if not pair.is_over:
            pair.tell_draft(commit=pb.Commit(start_position=start, token_ids=pair.tokens[start:]))
    assert pair.output == expected()
    assert not pair.errors


def test_frames_that_come_twice_or_late_change_nothing(pair: LinkedPair) -> None:
    joined(pair)
    held: list[pb.LinkEntry] = []

    def twice(frame: pb.LinkFrame) -> pb.LinkFrame:
        held.extend(frame.entries)
        return pb.LinkFrame(entries=[*frame.entries, *held[-3:]])

    pair.to_draft = twice
    assert pair.run() == expected()
    assert not pair.errors


def test_entries_of_another_epoch_or_session_are_strays_and_too_many_end_the_link(pair: LinkedPair) -> None:
    joined(pair)
    proposal = pb.Proposal(start_position=len(pair.tokens), token_ids=[5]).SerializeToString()
    stray = pb.LinkEntry(session_id="s", epoch=EPOCH + 1, proposal=proposal)
    pair.send(pair.target, stray, pb.LinkEntry(session_id="other", epoch=EPOCH, proposal=proposal))
    pair.turn()
    assert not pair.aborts
    pair.send(pair.target, *[stray] * 4096)
    pair.turn()
    assert "not joined" in pair.aborts[0].message
    pair.cut()
    assert pair.run() == expected()


def test_a_draft_that_floods_goes_back_to_the_relay(pair: LinkedPair) -> None:
    joined(pair)
    proposal = pb.Proposal(start_position=len(pair.tokens), token_ids=[5]).SerializeToString()
    entry = pb.LinkEntry(session_id="s", epoch=EPOCH, proposal=proposal)
    pair.send(pair.target, *[entry] * (MOST_PROPOSALS + 1))
    pair.turn(2)
    check_relayed_to_the_end(pair, "too many or too large")


def test_a_malformed_proposal_is_rejected_as_on_the_relay(pair: LinkedPair) -> None:
    joined(pair)
    pair.to_target = lambda frame: None  # the target reads the latest proposal only
    start = len(pair.tokens)
    pair.send(pair.target, pb.LinkEntry(session_id="s", epoch=EPOCH, proposal=b"\xff\xff"))
    pair.turn()
    pair.tell_target(proposal=b"\xff\xff")
    pair.turn()
    on_link, on_relay = pair.rejected
    assert on_link.status.code == code_pb2.INVALID_ARGUMENT
    assert on_link.expected_position == start
    assert on_link.status == on_relay.status
    pair.to_target = lambda frame: frame
    assert pair.run() == expected()
    assert pair.states[-1].is_direct


def test_proposals_on_a_link_that_has_not_joined_are_strays(pair: LinkedPair) -> None:
    joined(pair)
    lie = pb.Proposal(start_position=len(pair.tokens), token_ids=[5], draft_us=1).SerializeToString()
    entry = pb.LinkEntry(session_id="s", epoch=EPOCH, proposal=lie)
    wrong_key = pb.LinkEntry(session_id="s", epoch=EPOCH, join=pb.LinkJoin(key=bytes(16), position=1))
    pair.relays = False
    for _ in range(3):
        pair.send_as_stranger(entry, wrong_key, entry)
        pair.turn()
    assert not pair.aborts
    assert pair.states[-1].is_direct
    pair.send_as_stranger(*[entry] * 4096)
    pair.turn()
    assert "not joined" in pair.aborts[0].message
    assert pair.run() == expected()
    assert not pair.rejected


def test_a_new_grant_ends_the_former_drafts_link(pair: LinkedPair) -> None:
    joined(pair)
    pair.tell_target(link=pb.LinkGrant(key=bytes(16), epoch=EPOCH + 1))
    pair.turn(2)
    check_relayed_to_the_end(pair, "another grant")


def test_a_suspended_draft_gets_its_tokens_at_once_when_it_resumes(pair: LinkedPair) -> None:
    joined(pair)
    session = pair.target.host.sessions.get("s")
    assert session is not None
    pair.carried.clear()
    start = len(pair.tokens)
    for offset, suspends in enumerate((True, True, True, False)):
        verdict = pb.Verdict(start_position=start + offset, token_ids=[20 + offset], suspends_draft=suspends)
        assert not pair.target.worker.links.takes(session, {"verdict": verdict})
        assert verdict.HasField("linked")
        again = pb.Verdict(start_position=start + offset, token_ids=[20 + offset])
        pair.target.worker.links.takes(session, {"verdict": again})  # sent again after a break
        assert not again.HasField("linked")
    for frame in pair.target.turn():
        pair._from_target(frame)
    commits = [entry.commit for entry in pair.carried if entry.WhichOneof("entry") == "commit"][:2]
    assert [(list(commit.token_ids), commit.suspend) for commit in commits] == [([20], True), ([21, 22, 23], False)]


@for_each("role", ("target", "draft"))
def test_what_follows_on_an_aborted_link_is_no_coordinators(role: str) -> None:
    with linked_pair() as pair:
        joined(pair)
        core = getattr(pair, role)
        request: Any = target_pb2.VerifyRequest if role == "target" else draft_pb2.DraftRequest
        pair.send_bytes(core, b"\xff")
        pair.send_bytes(core, request(attach=pb.Attach(owner_id="test", lease_generation=9)).SerializeToString())
        pair.turn()
        (abort,) = pair.aborts
        assert "does not parse" in abort.message
        pair.cut()
        assert pair.run() == expected()


@for_each("role", ("target", "draft"))
def test_a_frame_of_too_many_parts_ends_its_link_before_it_is_parsed(role: str) -> None:
    with linked_pair() as pair:
        joined(pair)
        empty_entry = b"\x12\x00"
        assert len(pb.LinkFrame.FromString(empty_entry).entries) == 1
        pair.send_bytes(getattr(pair, role), empty_entry * 200_000)
        pair.turn()
        (abort,) = pair.aborts
        assert abort.message.startswith("entries: more than")
        pair.cut()
        assert pair.run() == expected()


def test_a_target_that_says_hello_on_and_on_gets_one_connection(pair: LinkedPair) -> None:
    joined(pair)
    local = pair.draft.port.local
    name = local.listen()
    hello = pb.LinkFrame(hello=pb.LinkHello(max_message_bytes=1 << 20, socket_path=name)).SerializeToString()
    for _ in range(3):
        pair.send_bytes(pair.draft, hello)
    pair.turn()
    opened = [frame for frame in local.receive() if frame.kind is FrameKind.LINK_OPENED]
    assert len(opened) == 1


@for_each("role", ("target", "draft"))
def test_bytes_that_are_no_frame_end_the_link_and_nothing_else(role: str) -> None:
    rng = random.Random(role)
    with linked_pair() as pair:
        joined(pair)
        core = getattr(pair, role)
        for _ in range(60):
            frame = pb.LinkFrame(entries=pair.carried[-1:]).SerializeToString()
            place = rng.randrange(len(frame) + 1)
            pair.send_bytes(core, frame[:place] + rng.randbytes(rng.randrange(6)) + frame[place:])
        pair.turn()
        if pair.aborts:
            pair.cut()
        assert pair.run() == expected()


def test_the_reference_is_what_a_pair_decodes() -> None:
    assert tuple(expected()[:5]) == reference(tuple(PROMPT), 11, 0, 1.0, MAX_TOKENS)[:5]


def test_a_coordinator_that_grants_ever_new_targets_makes_a_draft_dial_a_bounded_number() -> None:
    with linked_pair() as pair:
        pair.open()
        for number in range(400):
            pair.tell_draft(link=pb.LinkGrant(key=KEY, epoch=EPOCH, target=f"target-{number}:1"))
        ends: Any = pair.draft.worker.links
        pair.draft.worker._turn()
        assert len(ends._dialled) == 256
