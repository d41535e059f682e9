"""The role of a draft that drafts text: commits, proposals, resent chains, suspended sessions, and its bounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.rpc import code_pb2

from specdec.drafting.text.drafter import TextDrafter
from specdec.drafting.text.session import TextSession
from specdec.v1 import common_pb2 as pb
from tests.support.engine.local_pair import LocalPair, open_session, prompts
from tests.support.engine.other_tokenizers import draft_with_fewer_tokens
from tests.support.engine.rejection import REJECTION
from tests.support.engine.worker_client import WorkerClient, reason_of

PROMPT = prompts()[0][:24]


@pytest.fixture(scope="module")
def loaded_pair(tmp_path_factory: pytest.TempPathFactory) -> LocalPair:
    folder = draft_with_fewer_tokens(tmp_path_factory.mktemp("text") / "draft", 900)
    options = {"heterogeneous_vocab": "text", "max_ahead_tokens": 6, "max_sessions": 4, "max_model_len": 128}
    return LocalPair(draft=str(folder), draft_options=options)


@pytest.fixture
def client(loaded_pair: LocalPair) -> Iterator[WorkerClient]:
    client = WorkerClient(loaded_pair, "draft")
    assert isinstance(client.role, TextDrafter)
    client.attach()
    yield client
    client.end_all()
    client.check_nothing_held()


def drafting(client: WorkerClient, **options: Any) -> TextSession:
    client.entry("s", open=open_session(PROMPT, **{"max_tokens": 60, "ignore_eos": True, **options}))
    client.turn(40)
    session = client.session()
    assert isinstance(session, TextSession)
    return session


def proposals(client: WorkerClient) -> list[pb.Proposal]:
    return [pb.Proposal.FromString(encoded) for encoded in client.take("proposal")]


def commit(client: WorkerClient, start: int, tokens: list[int], *, suspend: bool = False) -> None:
    client.entry("s", commit=pb.Commit(start_position=start, token_ids=tokens, suspend=suspend))
    client.turn(40)


def check_session(session: TextSession) -> None:
    joint_ids = [joint for joint, _ in [*session.pieces, *session.drafted]]
    assert session.seq.token_ids == joint_ids[: len(session.seq.token_ids)]
    assert len(joint_ids) - len(session.seq.token_ids) <= 1
    assert len(session.scores) == len(session.drafted)


def test_a_chain_of_the_targets_tokens_hangs_from_the_last_committed_one(client: WorkerClient) -> None:
    session = drafting(client)
    sent = proposals(client)
    assert {proposal.start_position for proposal in sent} == {len(PROMPT)}
    assert all(not proposal.parents for proposal in sent)
    assert all(len(proposal.scores) == len(proposal.token_ids) == proposal.path_length for proposal in sent)
    lengths = [len(proposal.token_ids) for proposal in sent]
    assert lengths == sorted(set(lengths))
    assert 0 < lengths[-1] <= 6 + 1
    assert tuple(sent[-1].token_ids) == session.proposed
    check_session(session)
    assert client.role.wait_s(0.0) is None


def test_what_a_commit_confirms_stays_drafted(client: WorkerClient) -> None:
    session = drafting(client)
    drafted = list(proposals(client)[-1].token_ids)
    assert len(drafted) >= 3
    computed = session.seq.num_computed_tokens
    client.entry("s", commit=pb.Commit(start_position=24, token_ids=drafted[:2]))
    client.turn(40)
    assert session.num_committed == 26
    assert session.seq.num_computed_tokens >= computed
    sent = proposals(client)
    assert {proposal.start_position for proposal in sent} == {26}
    assert list(sent[-1].token_ids[: len(drafted) - 2]) == drafted[2:]
    check_session(session)


def test_a_chain_is_that_of_a_fresh_session_of_the_same_text(client: WorkerClient) -> None:
    session = drafting(client, temperature=1.0)
    position = len(PROMPT)
    for new in (list(session.proposed[:1]), [301, 302], [9], list(range(300, 309))):
        commit(client, position, new)
        position += len(new)
        check_session(session)
    fresh = open_session([*session.token_ids], max_tokens=60, ignore_eos=True, temperature=1.0)
    fresh.num_prompt_tokens = len(PROMPT)
    client.entry("fresh", open=fresh)
    client.turn(40)
    assert client.session("fresh").pieces == session.pieces
    assert client.session("fresh").proposed == session.proposed


def test_a_commit_that_leaves_a_gap_or_contradicts_ends_the_session(client: WorkerClient) -> None:
    drafting(client)
    commit(client, 25, [5])
    (error,) = client.take("error")
    assert (error.status.code, reason_of(error.status)) == (code_pb2.OUT_OF_RANGE, "COMMIT_GAP")
    assert error.expected_position == 24
    drafting(client)
    commit(client, 24, [5, 6])
    commit(client, 24, [5, 7])
    (error,) = client.take("error")
    assert reason_of(error.status) == "COMMIT_MISMATCH"


def test_a_repeated_commit_changes_nothing(client: WorkerClient) -> None:
    session = drafting(client)
    commit(client, 24, [5, 6])
    proposals(client)
    commit(client, 24, [5, 6])
    assert session.num_committed == 26
    assert proposals(client) == []


def test_a_suspended_session_computes_nothing_until_it_goes_on(client: WorkerClient) -> None:
    session = drafting(client)
    proposals(client)
    commit(client, 24, [5, 6], suspend=True)
    assert client.role.wait_s(0.0) is None
    assert proposals(client) == []
    commit(client, 26, [7])
    assert session.num_committed == 27
    assert {proposal.start_position for proposal in proposals(client)} == {27}


def test_after_a_broken_stream_the_chain_is_sent_again(client: WorkerClient) -> None:
    drafting(client)
    sent = proposals(client)[-1]
    client.attach(stream_id=2, held={"s": (1, 24)})
    client.turn(3)
    assert proposals(client)[-1].token_ids == sent.token_ids


def test_rejection_mode_gets_one_chain_of_the_likeliest_tokens_as_point_masses(client: WorkerClient) -> None:
    session = drafting(client, temperature=1.0, verify_mode=REJECTION, body={"max_draft_tokens": 4})
    [sent] = proposals(client)
    assert len(sent.token_ids) == 4
    assert sent.draws_afresh
    assert [list(each.token_ids) for each in sent.distributions] == [[token] for token in sent.token_ids]
    assert all(list(each.probs) == [1.0] for each in sent.distributions)
    client.entry("s", close=pb.CloseSession())
    client.turn()
    greedy = drafting(client)
    assert greedy.proposed[:3] == session.proposed[:3]


def test_no_more_is_drafted_than_the_output_may_have(client: WorkerClient) -> None:
    assert len(drafting(client, max_tokens=2).proposed) <= 2


def test_a_session_that_wants_no_drafts_gets_none(client: WorkerClient) -> None:
    drafting(client, body={"max_draft_tokens": 0})
    assert proposals(client) == []


def test_a_text_that_is_too_long_for_the_draft_is_refused_and_one_that_grows_too_long_ends(
    client: WorkerClient,
) -> None:
    client.entry("s", open=open_session([*PROMPT, *([4000] * 100)], max_tokens=60))
    client.turn(2)
    (error,) = client.take("error")
    assert error.status.code == code_pb2.INVALID_ARGUMENT
    drafting(client, max_tokens=500)
    client.take("proposal")
    position = len(PROMPT)
    for _ in range(20):
        commit(client, position, [4000, 4001, 4002, 4003])
        position += 4
        if errors := client.take("error"):
            break
    assert reason_of(errors[0].status) == "DRAFT_CONTEXT_END"


def test_it_drafts_no_further_than_the_target_finds_worth_it(client: WorkerClient) -> None:
    drafting(client)
    far = len(proposals(client)[-1].token_ids)
    client.send(target_load=pb.LoadReport(draft_credit=1))
    commit(client, 24, [4000])
    near = proposals(client)
    assert all(len(proposal.token_ids) <= 4 for proposal in near)
    assert far > 2
