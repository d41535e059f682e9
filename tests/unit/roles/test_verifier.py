"""The target's role: credit, limits, forks, hold-offs, and what a verdict says. On the real target."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.rpc import code_pb2

from specdec.v1 import common_pb2 as pb
from target_service.pacing.pacing import Pacing
from target_service.policy.hold_off import DEPTHS, DraftLatency, WaitAllowance
from tests.support.engine.local_pair import FreeRows, LocalPair, chain, open_session, prompts
from tests.support.engine.worker_client import WorkerClient, fields_of, reason_of

PROMPT = prompts()[0][:20]


@pytest.fixture(scope="module")
def loaded_pair() -> LocalPair:
    return LocalPair(hold_off_ms=0.0, max_sessions=4)


@pytest.fixture
def client(loaded_pair: LocalPair) -> Iterator[WorkerClient]:
    client = WorkerClient(loaded_pair, "target")
    client.pair.verifier.pacing.step_time = FreeRows()
    client.attach()
    client.turn()
    yield client
    client.end_all()
    client.check_nothing_held()


@pytest.fixture(scope="module")
def truth(loaded_pair: LocalPair) -> list[int]:
    """Prompt and greedy continuation."""
    loaded_pair.reset()
    body = open_session(PROMPT, max_tokens=60, ignore_eos=True)
    return [*PROMPT, *loaded_pair.run({"a": body}, use_draft=False)["a"].token_ids]


def a_session(max_tokens: int = 60, *, body: dict[str, object] | None = None, **sampling: object) -> pb.OpenSession:
    return open_session(PROMPT, max_tokens=max_tokens, ignore_eos=True, body=body, **sampling)


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
    acceptance = client.pair.verifier.pacing.expectations.acceptance
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


# --- hold-offs


def held(client: WorkerClient, pacing: Pacing) -> WorkerClient:
    """A session whose first token is decided, on a target that waits for drafts as `pacing` says."""
    pacing.step_time = FreeRows()
    client.pair.verifier.pacing = pacing
    client.entry("s", open=a_session())
    client.turn()
    assert client.session().num_tokens == 21
    return client


def test_a_step_waits_for_a_draft_and_goes_on_once_it_is_there(client: WorkerClient, truth: list[int]) -> None:
    held(client, Pacing(1e6))
    client.turn(5)
    assert client.session().num_tokens == 21
    client.entry("s", proposal=chain(21, truth[21:25]))
    client.turn(5)
    assert client.session().num_tokens == 21, "fewer nodes than are wanted"
    client.entry("s", proposal=chain(21, truth[21:29]))
    client.turn()
    assert client.session().num_tokens == 30
    verdict = client.take("verdict")[-1]
    assert not verdict.hit
    assert verdict.num_accepted == 8


def test_a_step_waits_no_longer_than_the_hold_off(client: WorkerClient) -> None:
    held(client, Pacing(500.0))
    client.turn(3)
    assert client.session().num_tokens == 21
    client.clock.now_s += 0.6
    client.turn()
    assert client.session().num_tokens == 22


def test_a_silent_draft_is_waited_for_twice_and_no_more(client: WorkerClient) -> None:
    held(client, Pacing(500.0))
    for _ in range(2):
        client.turn()
        client.clock.now_s += 0.6
        client.turn()
    assert client.session().num_tokens == 23
    client.turn(3)
    assert client.session().num_tokens == 26


@pytest.mark.parametrize("catches_up", [True, False])
def test_a_draft_that_steps_leave_behind_is_waited_for_now_and_then_until_it_has_caught_up(
    client: WorkerClient, truth: list[int], catches_up: bool
) -> None:
    """A step takes half a millisecond, an answer longer: what is proposed meanwhile is stale when it comes."""
    pacing = Pacing(None)
    held(client, pacing)
    pacing.step_time.base_s = 0.0005
    waits_s: list[float] = []
    num_stale = num_verified = 0
    begin_s, client.session().misses.num_unanswered = client.clock.now_s, 2  # two waits were in vain already
    while (position := client.session().num_tokens) < 60:
        client.turn()
        if (hold_off := client.session().hold_off) is not None:
            if catches_up:
                client.entry("s", proposal=chain(position, truth[position : position + 8]))
                client.turn()
            else:
                waits_s.append(hold_off.until_s - hold_off.since_s)
                client.clock.now_s = hold_off.until_s
                client.turn()
        else:
            client.entry("s", proposal=chain(position, truth[position : position + 1]))
            num_stale += 1
        client.clock.now_s += 0.0005
        num_verified += sum(sum(verdict.verified_by_depth) for verdict in client.take("verdict"))
    if catches_up:
        assert num_verified > 20
    else:
        assert num_verified == 0
        assert len(waits_s) == 1, "another one is not paid for yet"
        assert num_stale > 30
        assert sum(waits_s) <= WaitAllowance().most_s
    assert client.clock.now_s - begin_s < 1.0


@pytest.mark.parametrize("answers", [False, True])
def test_where_no_draft_answers_in_time_new_sessions_do_not_wait_to_find_out(
    client: WorkerClient, truth: list[int], answers: bool
) -> None:
    pacing = client.pair.verifier.pacing = Pacing(None)
    pacing.step_time, pacing.step_time.base_s = FreeRows(), 0.002
    waits_s: list[int | float] = []
    for number in range(20):
        waits_s.append(0.0)
        client.entry(name := f"s{number}", open=a_session(6))
        client.turn()
        while client.pair.target_host.sessions.get(name) is not None:
            hold_off = client.session(name).hold_off
            if hold_off is not None:
                position = client.session(name).num_tokens
                waits_s[-1] += hold_off.until_s - hold_off.since_s
                if answers:
                    client.entry(name, proposal=chain(position, truth[position : position + 4]))
                    client.turn()
                client.clock.now_s = hold_off.until_s
            client.clock.now_s += 0.002
            client.turn()
    late_s = sum(waits_s[10:])
    if answers:
        assert late_s > 0.02
    else:
        assert sum(waits_s[:10]) > 0
        assert late_s <= WaitAllowance().most_s


def test_prefill_and_sessions_without_drafts_are_not_kept_waiting(client: WorkerClient) -> None:
    held(client, Pacing(1e6))
    client.entry("t", open=a_session(5, body={"speculate": False}))
    client.turn(5)
    assert client.take("verdict", "t")[-1].finish_reason


def test_nobody_waits_for_a_draft_that_is_not_there_until_one_has_sent_something(
    client: WorkerClient, truth: list[int]
) -> None:
    client.pair.verifier.pacing = Pacing(1e6)
    client.pair.verifier.pacing.step_time = FreeRows()
    client.entry("s", open=a_session(body={"has_no_draft": True}))
    client.turn(4)
    assert client.session().num_tokens == 24
    client.entry("s", proposal=chain(24, truth[24:32]))
    client.turn()
    assert client.session().num_tokens == 33
    client.turn(5)
    assert client.session().num_tokens == 33, "it has a draft now"


def test_stale_proposals_do_not_count_as_an_answer(client: WorkerClient) -> None:
    held(client, Pacing(500.0))
    latency = DraftLatency()
    for _ in range(4):
        client.entry("s", proposal=chain(20, [1, 2, 3]))
        client.turn()
        client.clock.now_s += 0.6
        client.turn()
    assert client.pair.verifier.pacing.draft_latency == latency
    assert client.session().misses.num_unanswered == 2


@pytest.mark.parametrize("answers_late", [False, True])
def test_a_draft_that_lies_about_its_times_makes_nobody_wait_for_longer_than_some_steps(
    client: WorkerClient, truth: list[int], answers_late: bool
) -> None:
    """Sessions wait together: what one draft brings about, those of others feel."""
    pacing = Pacing(None)
    held(client, pacing)
    step_s = pacing.step_time.predict(1)
    waits_s: list[float] = []

    def lie() -> None:
        position = client.session().num_tokens
        wrong = pb.Proposal(start_position=position, token_ids=[truth[position] ^ 1], draft_us=2**32 - 1, path_length=1)
        client.entry("s", proposal=wrong.SerializeToString())
        client.turn()

    while (position := client.session().num_tokens) < 75:
        client.turn()  # plans the wait, if there is one, and takes the step otherwise
        hold_off = client.session().hold_off
        if hold_off is not None:
            waits_s.append(hold_off.until_s - hold_off.since_s)
            if answers_late:
                client.clock.now_s = hold_off.until_s - 1e-6
        lie()  # of less than is waited for
        while client.session().num_tokens == position:
            client.clock.now_s += step_s
            client.turn()
    assert len(waits_s) > 10
    assert max(waits_s) <= 2 * max(DEPTHS) * step_s + 1e-9
    assert [t for verdict in client.take("verdict") for t in verdict.token_ids] == truth[
        20 : client.session().num_tokens
    ]


@pytest.mark.parametrize("mode", [pb.VERIFY_MODE_COUPLED, pb.VERIFY_MODE_REJECTION])
def test_nobody_waits_for_a_draft_that_has_said_all(
    mode: pb.VerifyMode.ValueType, loaded_pair: LocalPair, truth: list[int]
) -> None:
    loaded_pair.reset()
    opens = {name: a_session(12, verify_mode=mode) for name in ("silent", "short")}

    def propose(name: str, tokens: list[int]) -> list[bytes]:
        said = truth[len(tokens) : len(tokens) + 1] if name == "short" else []
        proposal = pb.Proposal(start_position=len(tokens), token_ids=said, is_complete=True, draws_afresh=True)
        proposal.distributions.extend(pb.SparseDistribution(token_ids=[token], probs=[1.0]) for token in said)
        return [proposal.SerializeToString()]

    # An hour's hold-off would outlast the turns that a run may have.
    outcomes = loaded_pair.run(opens, use_draft=False, propose=propose, hold_off_ms=3.6e6, max_turns=200)
    assert [outcomes[name].token_ids for name in opens] == [truth[20:32]] * 2
    assert outcomes["short"].num_accepted > 0
