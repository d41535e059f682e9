"""Drafts that are suspended and go on: no token changes, nothing is computed meanwhile, and they catch up."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.v1 import common_pb2 as pb
from tests.support.engine.fickle_gates import Erratic, Spiteful
from tests.support.engine.local_pair import LocalPair, open_session, prompts
from tests.support.engine.rejection import REJECTION, check_distribution
from tests.support.engine.worker_client import WorkerClient
from tests.unit.lossless.cases import CASES
from tests.unit.lossless.sessions import body_of, examples

PROMPT = prompts()[0][:20]


@pytest.fixture(scope="module")
def loaded_pair() -> LocalPair:
    return LocalPair()


@given(seed=st.integers(0, 2**32))
@examples
def test_suspending_at_random_changes_no_token(loaded_pair: LocalPair, seed: int) -> None:
    rng = random.Random(seed)
    opens = {str(i): body_of({**rng.choice(CASES), "max_draft_tokens": 8}) for i in range(3)}
    loaded_pair.reset()
    plain = {name: outcome.token_ids for name, outcome in loaded_pair.run(opens, use_draft=False).items()}
    loaded_pair.reset()
    outcomes = loaded_pair.run(opens, rng=rng, gate=Erratic(seed))
    assert {name: outcome.token_ids for name, outcome in outcomes.items()} == plain
    assert all(not outcome.draft_errors and not outcome.rejected for outcome in outcomes.values())


def test_a_session_that_is_suspended_and_goes_on_is_drafted_for_again(loaded_pair: LocalPair) -> None:
    loaded_pair.reset()
    opens = {str(i): open_session(prompts()[i][:40], max_tokens=96, ignore_eos=True) for i in range(3)}
    outcomes = loaded_pair.run(opens, gate=Spiteful()).values()
    for outcome in outcomes:
        assert any(verdict.suspends_draft for verdict in outcome.verdicts)
        assert outcome.num_accepted > 10
        for before, after in zip(outcome.verdicts, outcome.verdicts[1:], strict=False):
            assert not (before.suspends_draft and after.num_accepted)


def test_the_distribution_is_the_targets_whatever_outcomes_suspend_a_draft(loaded_pair: LocalPair) -> None:
    """Rejection mode, where a policy may look at what was accepted and at nothing that is still to be decided."""
    check_distribution(loaded_pair, REJECTION, 768, gates=Spiteful)


# --- the draft


@pytest.fixture
def client(loaded_pair: LocalPair) -> Iterator[WorkerClient]:
    loaded_pair.reset()
    client = WorkerClient(loaded_pair, "draft")
    client.attach()
    yield client
    client.end_all()
    client.check_nothing_held()


def commit(client: WorkerClient, start: int, tokens: list[int], *, suspend: bool = False) -> None:
    client.entry("s", commit=pb.Commit(start_position=start, token_ids=tokens, suspend=suspend))
    client.turn(30)


def test_a_suspended_draft_computes_and_proposes_nothing(client: WorkerClient) -> None:
    client.entry("s", open=open_session(PROMPT, max_tokens=200, ignore_eos=True))
    client.turn(30)
    assert client.take("proposal")
    commit(client, 20, [7, 8, 9], suspend=True)
    assert client.take("proposal") == []
    assert client.role.wait_s(0.0) is None
    num_computed = client.session().heads[0].seq.num_computed_tokens
    assert num_computed < client.session().num_committed


@pytest.mark.parametrize("suspend", [True, False])
def test_a_commit_that_was_overtaken_on_another_way_suspends_and_resumes_nothing(
    client: WorkerClient, suspend: bool
) -> None:
    client.entry("s", open=open_session(PROMPT, max_tokens=200, ignore_eos=True))
    commit(client, 20, [7, 8])
    commit(client, 22, [9], suspend=suspend)
    commit(client, 20, [7, 8], suspend=not suspend)
    assert client.session().is_suspended == suspend
    commit(client, 23, [10], suspend=not suspend)
    assert client.session().is_suspended != suspend


def test_where_one_session_after_the_other_is_suspended_the_next_waits_for_its_first_commit(
    client: WorkerClient,
) -> None:
    """Its prompt would be computed for nothing. Other kinds of requests go on as before."""

    def begin(temperature: float) -> bool:
        client.entry("s", open=open_session(PROMPT, max_tokens=200, ignore_eos=True, temperature=temperature))
        client.turn(30)
        return bool(client.take("proposal"))

    def end(*, suspend: bool) -> bool:
        commit(client, 20, [7, 8], suspend=suspend)
        has_proposed = bool(client.take("proposal"))
        client.entry("s", close=pb.CloseSession(reason="done"))
        client.turn(2)
        return has_proposed

    for _ in range(4):
        assert begin(0.0)
        assert not end(suspend=True)
    assert not begin(0.0)
    assert client.role.wait_s(0.0) is None
    assert client.session().heads[0].seq.num_computed_tokens == 0
    assert not end(suspend=True)
    assert begin(1.0)
    end(suspend=True)
    assert not begin(0.0)
    assert end(suspend=False), "somebody wants it, so it begins"
    assert begin(0.0)
    end(suspend=False)


@pytest.mark.parametrize("mode", [pb.VERIFY_MODE_COUPLED, REJECTION])
def test_a_draft_that_goes_on_proposes_what_one_that_never_paused_does(
    client: WorkerClient, mode: pb.VerifyMode.ValueType
) -> None:
    tokens = prompts()[1][:30]

    def drafted(*, pauses: bool) -> list[int]:
        client.entry("s", open=open_session(PROMPT, max_tokens=200, ignore_eos=True, verify_mode=mode))
        client.turn(30)
        if pauses:
            commit(client, 20, tokens[:2], suspend=True)
            commit(client, 22, tokens[2:])
        else:
            for index, token in enumerate(tokens):
                commit(client, 20 + index, [token])
        proposal = pb.Proposal.FromString(client.take("proposal")[-1])
        session = client.session()
        path = [session.tree.token_ids[node] for node in session.main_path]
        client.entry("s", close=pb.CloseSession(reason="done"))
        client.turn(2)
        assert proposal.start_position == 50
        assert set(path) <= set(proposal.token_ids)
        return path

    path = drafted(pauses=True)
    assert len(path) > 3
    assert drafted(pauses=False) == path


# --- wishes


def test_wishes_for_a_time_per_token_change_no_token(loaded_pair: LocalPair) -> None:
    wishes = (0, 1, 500, 2**32 - 1)
    opens = {
        str(wish): open_session(prompts()[0][:40], max_tokens=48, body={"time_per_token_us": wish}) for wish in wishes
    }
    loaded_pair.reset()
    outcomes = loaded_pair.run(opens, verify_all=False)
    assert len({tuple(outcome.token_ids) for outcome in outcomes.values()}) == 1
