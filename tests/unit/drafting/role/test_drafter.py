"""The draft's role: chains, commits, rollbacks, and what it proposes. On the real draft."""

from __future__ import annotations

import pytest
from google.rpc import code_pb2

from specdec.drafting.role.growth import GrowthPolicy
from specdec.engine.tree import TokenTree
from specdec.replica.bridge.frames import FrameKind
from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2
from tests.support.engine.drafting_client import (
    MAX_AHEAD,
    PROMPT,
    a_session,
    chain_of,
    commit,
    drafting,
    grow,
    length_within,
    main_tokens,
    other,
    proposals,
    session_path,
)
from tests.support.engine.local_pair import LocalPair
from tests.support.engine.worker_client import WorkerClient, fields_of, reason_of


def test_it_drafts_as_far_ahead_as_it_may_and_no_further(client: WorkerClient) -> None:
    drafting(client)
    assert len(chain_of(client)) == MAX_AHEAD
    assert client.role.wait_s(0.0) is None


def test_every_proposal_carries_the_whole_chain_from_the_last_committed_position(client: WorkerClient) -> None:
    drafting(client)
    sent = proposals(client)
    chain = chain_of(client)
    assert all(proposal.start_position == 20 for proposal in sent)
    assert all(len(proposal.scores) == len(proposal.token_ids) for proposal in sent)
    lengths = [length_within(proposal, chain) for proposal in sent]
    assert lengths == sorted(set(lengths))
    assert lengths[0] > 0
    assert lengths[-1] == MAX_AHEAD


def test_beside_the_chain_a_proposal_offers_other_tokens_at_its_positions(client: WorkerClient) -> None:
    drafting(client)
    sent = proposals(client)[-1]
    tree = TokenTree(sent.token_ids, sent.parents or None)
    assert len(tree) <= 64
    siblings = list(zip(tree.parents, tree.token_ids, strict=True))
    assert len(set(siblings)) == len(siblings)
    assert MAX_AHEAD < len(tree) <= 3 * MAX_AHEAD
    on_chain = {-1, *session_path(client)}
    assert all(parent in on_chain for parent in tree.parents), "runners-up are leaves while one head grows"


def test_a_commit_that_confirms_the_chain_keeps_the_rest_of_it(client: WorkerClient) -> None:
    drafting(client)
    chain = chain_of(client)
    rollbacks = client.engine.stats().rollbacks
    proposals(client)
    commit(client, 20, chain[:3], turns=20)
    assert chain_of(client)[:3] == chain[3:]
    assert len(chain_of(client)) == MAX_AHEAD
    assert client.engine.stats().rollbacks == rollbacks
    sent = proposals(client)
    assert {proposal.start_position for proposal in sent} == {23}
    assert length_within(sent[0], chain[3:]) == 3
    assert length_within(sent[-1], chain_of(client)) == MAX_AHEAD


def test_a_commit_rolls_back_at_the_first_difference(client: WorkerClient) -> None:
    drafting(client)
    chain = chain_of(client)
    before = client.engine.stats()
    commit(client, 20, [chain[0], chain[1], other(chain[2])], turns=20)
    session = client.session()
    assert session.heads[0].seq.token_ids[20:23] == [chain[0], chain[1], other(chain[2])]
    assert session.num_committed == 23
    after = client.engine.stats()
    assert after.rollbacks == before.rollbacks + 1
    assert after.rollback_tokens == before.rollback_tokens + MAX_AHEAD - 2
    assert proposals(client)[-1].start_position == 23


def test_a_commit_past_the_chain_is_taken_over(client: WorkerClient) -> None:
    drafting(client)
    chain = chain_of(client)
    new = [*chain, 5, 6, 7]
    commit(client, 20, new, turns=20)
    assert client.session().num_committed == 20 + len(new)
    assert client.session().heads[0].seq.token_ids[20 : 20 + len(new)] == new
    assert len(chain_of(client)) == MAX_AHEAD


def test_the_chain_after_commits_is_that_of_a_fresh_session(client: WorkerClient) -> None:
    """Whether its tokens were confirmed, contradicted or overtaken, a chain depends on the committed tokens alone."""
    drafting(client, a_session(temperature=1.0))
    first = chain_of(client)
    position, committed = 20, list(PROMPT)
    for new in ([first[0]], [9], [8, 7], [1, 2, 3, 4, 5, 6, 7, 8]):
        commit(client, position, new, turns=20)
        position, committed = position + len(new), [*committed, *new]
        body = a_session(temperature=1.0)
        body.token_ids[:] = committed
        client.entry("fresh", open=body)
        client.turn(20)
        fresh = main_tokens(client.session("fresh"))
        assert chain_of(client) == fresh
        client.entry("fresh", close=pb.CloseSession())
        client.turn()


def test_a_repeated_commit_is_compared_and_changes_nothing(client: WorkerClient) -> None:
    drafting(client)
    chain = chain_of(client)
    commit(client, 20, chain[:3], turns=20)
    after = chain_of(client)
    commit(client, 20, chain[:3], turns=5)
    commit(client, 21, chain[1:3], turns=5)
    assert chain_of(client) == after
    assert client.session().num_committed == 23
    commit(client, 22, [chain[2], after[0]], turns=5)
    assert client.session().num_committed == 24
    assert not client.take("error")


def test_a_commit_that_leaves_a_gap_ends_the_session_and_tells_the_position(client: WorkerClient) -> None:
    drafting(client)
    commit(client, 21, [5])
    (error,) = client.take("error")
    assert error.status.code == code_pb2.OUT_OF_RANGE
    assert error.expected_position == 20
    assert reason_of(error.status) == "COMMIT_GAP"
    assert fields_of(error.status) == ["commit.start_position"]
    client.check_nothing_held()


@pytest.mark.parametrize("start", [18, 19])
def test_a_commit_that_contradicts_committed_tokens_ends_the_session(client: WorkerClient, start: int) -> None:
    drafting(client)
    commit(client, start, [other(PROMPT[start]), 5, 6])
    (error,) = client.take("error")
    assert error.status.code == code_pb2.FAILED_PRECONDITION
    assert reason_of(error.status) == "COMMIT_MISMATCH"
    client.check_nothing_held()


def test_a_commit_of_an_unknown_id_ends_the_session(client: WorkerClient) -> None:
    drafting(client)
    commit(client, 20, [4096])
    assert client.take("error")[0].status.code == code_pb2.INVALID_ARGUMENT
    client.check_nothing_held()


def test_the_chain_stops_at_a_token_that_ends_the_choice(client: WorkerClient) -> None:
    drafting(client)
    chain = chain_of(client)
    client.entry("s", epoch=2, open=a_session(stop_token_ids=[chain[2]]))
    client.turn(20)
    assert chain_of(client) == chain[: chain.index(chain[2]) + 1]
    assert client.session().heads[0].is_over


def test_the_chain_stops_at_max_tokens(client: WorkerClient) -> None:
    drafting(client, a_session(max_tokens=3))
    assert len(chain_of(client)) == 3


def test_a_chain_that_was_over_goes_on_after_a_commit_that_says_otherwise(client: WorkerClient) -> None:
    drafting(client)
    chain = chain_of(client)
    client.entry("s", epoch=2, open=a_session(stop_token_ids=[chain[0]]))
    client.turn(20)
    assert len(chain_of(client)) == 1
    client.entry("s", epoch=2, commit=pb.Commit(start_position=20, token_ids=[other(chain[0])]))
    client.turn(20)
    assert chain_of(client)


def test_a_hopeless_chain_is_not_made_longer(client: WorkerClient) -> None:
    grow(client, max_heads=1, min_path_score=1.1)
    drafting(client)
    assert len(chain_of(client)) == 1


def test_a_session_that_wants_no_drafts_gets_none(client: WorkerClient) -> None:
    drafting(client, a_session(body={"max_draft_tokens": 0}))
    assert chain_of(client) == []
    commit(client, 20, [5, 6], turns=5)
    assert chain_of(client) == []
    assert client.session().num_committed == 22
    assert not proposals(client)


def test_an_orphan_drafts_nothing_and_attaching_brings_its_chain_again(client: WorkerClient) -> None:
    drafting(client, turns=1)
    client.frame(FrameKind.STREAM_CLOSED)
    client.turn(10)
    assert len(chain_of(client)) < MAX_AHEAD
    chain = chain_of(client)
    proposals(client)
    client.attach(stream_id=2, held={"s": (1, 20)})
    client.turn(10)
    sent = proposals(client)
    assert length_within(sent[0], chain) == len(chain)
    assert len(chain_of(client)) == MAX_AHEAD


def test_attaching_after_lost_commits_ends_the_session_with_the_position_it_expects(client: WorkerClient) -> None:
    drafting(client)
    client.frame(FrameKind.STREAM_CLOSED)
    client.attach(stream_id=2, held={"s": (1, 25)})
    client.turn()
    (error,) = client.take("error")
    assert reason_of(error.status) == "COMMIT_GAP"
    assert error.expected_position == 20


def test_sessions_beyond_the_limit_are_refused(client: WorkerClient) -> None:
    for i in range(5):
        client.entry(f"s{i}", open=a_session())
    client.turn()
    assert reason_of(client.take("error", "s4")[0].status) == "TOO_MANY_SESSIONS"


def test_the_end_of_the_drafts_context_ends_the_session_not_the_process() -> None:
    client = WorkerClient(LocalPair(draft_options={"max_model_len": 24}), "draft")
    client.attach()
    drafting(client)
    assert client.session().num_committed + len(chain_of(client)) <= 24
    commit(client, 20, [1, 2, 3, 4, 5, 6])
    assert reason_of(client.take("error")[0].status) == "DRAFT_CONTEXT_END"
    client.check_nothing_held()


def branch_of(client: WorkerClient) -> tuple[list[int], int]:
    """Tokens from the root to the end of the longest branch, and at which depth it leaves the main path."""
    session = client.session()
    main = session.main_path
    off = [node for node in range(len(session.tree)) if node not in main]
    paths = [session.tree.path(node) for node in off]
    path = max(paths, key=lambda path: len([node for node in path if node not in main]))
    leaves_at = next(depth for depth, node in enumerate(path) if node not in main)
    return [session.tree.token_ids[node] for node in path], leaves_at


def test_with_more_heads_runners_up_are_followed_too(client: WorkerClient) -> None:
    grow(client, max_heads=4, min_path_score=0.0, min_branch_score=0.0)
    drafting(client, a_session(temperature=1.0))
    tokens, leaves_at = branch_of(client)
    assert len(tokens) - leaves_at >= 2, "something was drafted below a runner-up"
    assert len(client.session().tree) <= 64


def test_a_commit_of_a_runner_up_keeps_what_was_drafted_below_it(client: WorkerClient) -> None:
    grow(client, max_heads=4, min_path_score=0.0, min_branch_score=0.0)
    drafting(client, a_session(temperature=1.0))
    tokens, leaves_at = branch_of(client)
    proposals(client)
    commit(client, 20, tokens[: leaves_at + 1], turns=20)
    session = client.session()
    assert session.num_committed == 20 + leaves_at + 1
    assert length_within(proposals(client)[0], tokens[leaves_at + 1 :]) == len(tokens) - leaves_at - 1


def test_what_branches_draft_is_what_a_fresh_session_drafts(client: WorkerClient) -> None:
    grow(client, max_heads=4, min_path_score=0.0, min_branch_score=0.0)
    drafting(client, a_session(temperature=1.0))
    tokens, leaves_at = branch_of(client)
    grow(client, max_heads=1, min_path_score=0.0)
    body = a_session(temperature=1.0)
    body.token_ids.extend(tokens[: leaves_at + 1])
    client.entry("fresh", open=body)
    client.turn(20)
    rest = tokens[leaves_at + 1 :]
    assert main_tokens(client.session("fresh"))[: len(rest)] == rest


def test_no_tree_outgrows_what_a_proposal_may_carry(client: WorkerClient) -> None:
    client.pair.drafter.growth = GrowthPolicy(64, 64, max_heads=8, min_path_score=0.0, min_branch_score=0.0)
    drafting(client, a_session(temperature=1.0, max_tokens=200), turns=80)
    assert 50 < len(client.session().tree) <= 64
    assert all(len(proposal.token_ids) <= 64 for proposal in proposals(client))


def test_the_load_that_the_target_reports_bounds_how_far_it_drafts(client: WorkerClient) -> None:
    drafting(client, turns=1)
    session = client.session()
    report = draft_pb2.DraftRequest(target_load=pb.LoadReport(draft_credit=1))
    client.pair.drafter.owner_message(session.owner, report)
    client.turn(20)
    assert len(chain_of(client)) == 3
    report.target_load.draft_credit = 8
    client.pair.drafter.owner_message(session.owner, report)
    commit(client, 20, chain_of(client)[:1], turns=20)
    assert len(chain_of(client)) == MAX_AHEAD
