"""The target's role: credit, limits, forks, and what a verdict says. On the real target."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from google.rpc import code_pb2

from specdec.target_service.proposals.head_runner import HeadRunner
from specdec.v1 import common_pb2 as pb
from tests.support.engine.local_pair import LocalPair, chain, open_session
from tests.support.engine.targets import PROMPT, a_session
from tests.support.engine.worker_client import WorkerClient, fields_of, reason_of


def test_a_session_stops_at_its_credit_and_goes_on_when_it_is_raised(client: WorkerClient, truth: list[int]) -> None:
    client.entry("s", open=a_session(body={"credit_position": 22}))
    client.turn(10)
    assert client.session().num_tokens == 22
    client.entry("s", credit=pb.Credit(position=24))
    client.turn(10)
    assert client.session().num_tokens == 24
    client.entry("s", credit=pb.Credit(position=23))  # an old one that came late
    client.turn(10)
    assert client.session().num_tokens == 24
    assert [t for verdict in client.take("verdict") for t in verdict.token_ids] == truth[20:24]


def test_without_any_credit_the_first_token_is_decided_all_the_same(client: WorkerClient) -> None:
    client.entry("s", open=a_session(body={"credit_position": 0}))
    client.turn(10)
    assert client.session().num_tokens == 21


def test_a_session_that_is_opened_again_at_its_credit_waits_for_more(client: WorkerClient, truth: list[int]) -> None:
    for epoch in (1, 2, 3):
        body = a_session(body={"credit_position": 22})
        body.token_ids[:] = truth[:22]
        client.entry("s", epoch, open=body)
        client.turn(10)
        assert client.session().num_tokens == 22
    client.entry("s", 3, credit=pb.Credit(position=24))
    client.turn(10)
    assert [t for verdict in client.take("verdict") for t in verdict.token_ids] == truth[22:24]


def test_accepted_drafts_never_pass_the_credit(client: WorkerClient, truth: list[int]) -> None:
    client.entry("s", open=a_session(body={"credit_position": 21}))
    client.turn(4)
    client.entry("s", proposal=chain(21, truth[21:29]))
    client.entry("s", credit=pb.Credit(position=25))
    client.turn(5)
    assert client.session().num_tokens == 25
    verdict = client.take("verdict")[1]
    assert verdict.token_ids == truth[21:25]
    assert verdict.num_accepted == 3


def test_what_is_left_of_a_tree_is_verified_in_the_very_next_step(client: WorkerClient, truth: list[int]) -> None:
    client.entry("s", open=a_session(body={"max_draft_tokens": 3, "credit_position": 21}))
    client.turn(4)
    client.entry("s", proposal=chain(21, truth[21:37]))
    client.entry("s", credit=pb.Credit(position=100))
    client.turn(4)
    first, *later = client.take("verdict")
    assert first.origins == [pb.ORIGIN_PREFILL]
    assert [len(verdict.token_ids) for verdict in later] == [4, 4, 4, 4]
    assert all(verdict.hit for verdict in later)


def test_a_verdict_counts_what_was_verified_accepted_and_wasted(client: WorkerClient, truth: list[int]) -> None:
    client.entry("s", open=a_session(body={"credit_position": 21}))
    client.turn(4)
    wrong = (truth[22] + 1) % 4096
    proposal = pb.Proposal(
        start_position=21,
        token_ids=[wrong, truth[21], wrong, truth[22], wrong],
        parents=[-1, -1, 1, 1, 0],
        draft_us=70,
        path_length=2,
    )
    client.entry("s", proposal=proposal.SerializeToString())
    client.entry("s", credit=pb.Credit(position=30))
    client.turn()
    verdict = client.take("verdict")[1]
    assert verdict.token_ids == truth[21:24]
    assert verdict.origins == [pb.ORIGIN_DRAFT, pb.ORIGIN_DRAFT, pb.ORIGIN_BONUS]
    assert verdict.verified_by_depth == [2, 3]
    assert verdict.num_accepted == 2
    assert verdict.num_wasted == 3
    assert verdict.draft_us == 70
    assert verdict.hit


def test_what_was_drafted_past_the_end_of_a_choice_does_not_count_as_refused(
    client: WorkerClient, truth: list[int]
) -> None:
    acceptance = client.pair.verifier.steps.pacing.expectations.acceptance
    before = acceptance.depth_rate
    client.entry("s", open=a_session(stop_token_ids=[truth[21]], body={"credit_position": 21}))
    client.turn(4)
    client.entry("s", proposal=chain(21, truth[21:25]))
    client.entry("s", credit=pb.Credit(position=40))
    client.turn(5)
    last = client.take("verdict")[-1]
    assert (last.token_ids, last.finish_reason) == ([truth[21]], pb.FINISH_REASON_STOP)
    assert sum(last.verified_by_depth) == 4
    assert acceptance.depth_rate > before


def test_max_draft_tokens_of_zero_ignores_proposals(client: WorkerClient, truth: list[int]) -> None:
    client.entry("s", open=a_session(4, body={"max_draft_tokens": 0}))
    client.entry("s", proposal=b"\xff")
    client.entry("s", proposal=chain(20, truth[20:30]))
    client.turn(10)
    assert not client.take("proposal_rejected")
    assert [list(v.verified_by_depth) for v in client.take("verdict")] == [[]] * 4


def test_no_owner_can_ask_for_longer_drafts_than_the_target_takes(client: WorkerClient) -> None:
    client.entry("s", open=a_session(body={"max_draft_tokens": 64}))
    client.turn()
    assert client.session().max_nodes == 8


def test_a_session_beyond_the_limit_is_refused_and_told_why(client: WorkerClient) -> None:
    for i in range(5):
        client.entry(f"s{i}", open=a_session())
    client.turn()
    (error,) = client.take("error", "s4")
    assert error.status.code == code_pb2.RESOURCE_EXHAUSTED
    assert reason_of(error.status) == "TOO_MANY_SESSIONS"


def test_a_replaced_session_does_not_count_against_the_limit(client: WorkerClient) -> None:
    for i in range(4):
        client.entry(f"s{i}", open=a_session())
    client.entry("s3", epoch=2, open=a_session())
    client.turn()
    assert not client.take("error", "s3")
    assert client.session("s3").epoch == 2


def test_a_finished_session_is_closed_by_the_target_and_later_entries_are_harmless(client: WorkerClient) -> None:
    client.entry("s", open=a_session(2))
    client.turn(4)
    assert client.take("verdict")[-1].finish_reason == pb.FINISH_REASON_LENGTH
    client.check_nothing_held()
    client.entry("s", proposal=chain(20, [1]))
    client.entry("s", credit=pb.Credit(position=99))
    client.entry("s", close=pb.CloseSession())
    client.turn()
    assert not client.take("error")


def test_a_rejected_proposal_names_the_field_and_the_position(client: WorkerClient) -> None:
    client.entry("s", open=a_session())
    client.turn()
    client.entry("s", proposal=chain(30, [1]))
    client.turn()
    (rejected,) = client.take("proposal_rejected")
    assert rejected.expected_position == 21
    assert fields_of(rejected.status) == ["proposal.start_position"]
    assert client.session() is not None


def test_a_fork_of_a_session_that_has_decided_prefills_on_its_own(client: WorkerClient, truth: list[int]) -> None:
    client.entry("s", open=a_session())
    client.turn(3)
    client.entry("t", open=a_session(4, body={"fork_from": "s"}, choice=1))
    client.turn(6)
    assert [t for verdict in client.take("verdict", "t") for t in verdict.token_ids] == truth[20:24]


def test_a_fork_of_another_prompt_is_not_one(client: WorkerClient, truth: list[int]) -> None:
    client.entry("s", open=open_session(PROMPT[:-1], max_tokens=4))
    client.entry("t", open=a_session(4, body={"fork_from": "s"}))
    client.turn(8)
    assert [t for verdict in client.take("verdict", "t") for t in verdict.token_ids] == truth[20:24]


def test_forks_wait_for_one_prefill_and_closing_one_of_them_leaves_the_others(client: WorkerClient) -> None:
    client.entry("s", open=a_session(3))
    client.entry("t", open=a_session(3, body={"fork_from": "s"}))
    client.entry("u", open=a_session(3, body={"fork_from": "s"}))
    client.entry("t", close=pb.CloseSession())
    client.turn(6)
    assert not client.take("verdict", "t")
    assert len(client.take("verdict", "u")) == len(client.take("verdict", "s")) == 3
    client.check_nothing_held()


def test_a_reopened_session_describes_no_prefill_token(client: WorkerClient, truth: list[int]) -> None:
    body = a_session(8)
    body.token_ids.extend(truth[20:24])
    client.entry("s", open=body)
    client.turn(8)
    verdicts = client.take("verdict")
    assert [t for verdict in verdicts for t in verdict.token_ids] == truth[24:28]
    assert verdicts[0].origins == [pb.ORIGIN_DECODE]
    assert verdicts[-1].finish_reason == pb.FINISH_REASON_LENGTH


@pytest.mark.parametrize("edges", [(4, 8), ()], ids=["captured", "what heads need could not be captured"])
def test_rows_are_free_up_to_what_steps_are_really_padded_to(
    edges: tuple[int, ...], loaded_pair: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays = SimpleNamespace(row_edges=(4, 8))
    monkeypatch.setattr(loaded_pair.target_built.model, "replays", replays)
    monkeypatch.setattr(HeadRunner, "prepare", lambda self: setattr(replays, "row_edges", edges))
    loaded_pair.reset()
    assert loaded_pair.verifier.steps.pacing.clock.rows.edges == edges
