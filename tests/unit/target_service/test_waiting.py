"""Whom a target's steps wait for, and for how long. On the real target."""

from __future__ import annotations

import pytest

from specdec.target_service.pacing.pacing import Pacing
from specdec.target_service.policy.hold_off import CATCH_UP_S, DEPTHS, DraftLatency
from specdec.v1 import common_pb2 as pb
from tests.support.engine.free_rows import FreeRows
from tests.support.engine.local_pair import LocalPair, chain
from tests.support.engine.targets import a_session
from tests.support.engine.worker_client import WorkerClient


def held(client: WorkerClient, pacing: Pacing) -> WorkerClient:
    """A session whose first token is decided, on a target that waits for drafts as `pacing` says."""
    pacing.clock.rows = FreeRows()
    client.pair.verifier.steps.pacing = pacing
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


def test_a_wait_that_anothers_prompt_cuts_short_does_not_make_a_draft_silent(
    client: WorkerClient, truth: list[int]
) -> None:
    held(client, Pacing(500.0))
    for name in ("a", "b", "c"):
        client.turn()
        client.entry(name, open=a_session())
        client.turn()
        client.entry(name, close=pb.CloseSession())
        client.turn()
    position = client.session().num_tokens
    assert position >= 23, "steps that others were in did not wait"
    assert client.session().hold_off is not None, "but it is still waited for"
    client.entry("s", proposal=chain(position, truth[position : position + 8]))
    client.turn()
    assert client.session().num_tokens == position + 9


@pytest.mark.parametrize("catches_up", [True, False])
def test_a_draft_that_steps_leave_behind_is_waited_for_now_and_then_until_it_has_caught_up(
    client: WorkerClient, truth: list[int], catches_up: bool
) -> None:
    """A step takes half a millisecond, an answer longer: what is proposed meanwhile is stale when it comes."""
    pacing = Pacing(None)
    held(client, pacing)
    pacing.clock.rows.base_s = 0.0005
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
        assert sum(waits_s) <= CATCH_UP_S
    assert client.clock.now_s - begin_s < 1.0


def test_a_draft_whose_network_becomes_slower_is_waited_for_as_long_as_its_answers_take(
    client: WorkerClient, truth: list[int]
) -> None:
    pacing = Pacing(None)
    held(client, pacing)
    pacing.clock.rows.base_s, pacing.draft_latency.first_s = 0.02, 0.003
    choice = pacing._hold_off["greedy"]
    for depth, num_tokens in ((0, 1), (2, 3), (4, 1)):
        choice.observe(depth, num_tokens, 0.02)  # a depth of two pays
    waits: list[bool] = []
    """Whether each wait was answered."""
    while (position := client.session().num_tokens) < 70:
        client.turn()
        hold_off = client.session().hold_off
        if hold_off is not None and client.session().num_tokens == position:
            answer_s = hold_off.since_s + 0.013
            waits.append(answer_s < hold_off.until_s)
            client.clock.now_s = min(hold_off.until_s, answer_s)
            if waits[-1]:
                client.entry("s", proposal=chain(position, truth[position : position + 2]))
            client.turn()
        position = client.session().num_tokens
        client.entry("s", proposal=chain(position, truth[position : position + 1]))  # in time after a plain step
        client.turn()
    first = waits.index(True)
    assert 0 < first <= 4
    assert all(waits[first:])


@pytest.mark.parametrize("answers", [False, True])
def test_where_no_draft_answers_in_time_new_sessions_do_not_wait_to_find_out(
    client: WorkerClient, truth: list[int], answers: bool
) -> None:
    pacing = client.pair.verifier.steps.pacing = Pacing(None)
    pacing.clock.rows, pacing.clock.rows.base_s = FreeRows(), 0.002
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
        assert late_s <= CATCH_UP_S


def test_prefill_and_sessions_without_drafts_are_not_kept_waiting(client: WorkerClient) -> None:
    held(client, Pacing(1e6))
    client.entry("t", open=a_session(5, body={"speculate": False}))
    client.turn(5)
    assert client.take("verdict", "t")[-1].finish_reason


def test_nobody_waits_for_a_draft_that_is_not_there_until_one_has_sent_something(
    client: WorkerClient, truth: list[int]
) -> None:
    client.pair.verifier.steps.pacing = Pacing(1e6)
    client.pair.verifier.steps.pacing.clock.rows = FreeRows()
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
    latency = DraftLatency(first_s=0.5)  # of the waits in vain
    for _ in range(4):
        client.entry("s", proposal=chain(20, [1, 2, 3]))
        client.turn()
        client.clock.now_s += 0.6
        client.turn()
    assert client.pair.verifier.steps.pacing.draft_latency == latency
    assert client.session().misses.num_unanswered == 2


@pytest.mark.parametrize("answers_late", [False, True])
def test_a_draft_that_lies_about_its_times_makes_nobody_wait_for_longer_than_some_steps(
    client: WorkerClient, truth: list[int], answers_late: bool
) -> None:
    """Sessions wait together: what one draft brings about, those of others feel."""
    pacing = Pacing(None)
    held(client, pacing)
    step_s = pacing.clock.rows.predict(1)
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
