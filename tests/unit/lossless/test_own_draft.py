"""A target that drafts itself gives the tokens of plain decoding, and what its draft does wrong costs no session."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.drafting.role.local import LocalDraft
from specdec.engine.errors import KVInvariantError
from specdec.engine.outputs import StepOutput
from specdec.target_service.pacing.expectations import Expectations
from specdec.target_service.policy.gate_state import GateState
from specdec.v1 import common_pb2 as pb
from tests.support.engine.fickle_gates import Bookkeeping, Erratic, Spiteful
from tests.support.engine.local_pair import LocalPair, open_session, prompts
from tests.support.engine.rejection import REJECTION, check_distribution
from tests.unit.lossless.cases import CASES
from tests.unit.lossless.sessions import Plainly, assert_all_equal, assert_equal, body_of, examples


@pytest.fixture
def own(loaded_pair: LocalPair) -> Iterator[LocalPair]:
    loaded_pair.reset(own_draft=True)
    yield loaded_pair
    loaded_pair.reset()


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: f"temperature={case['temperature']}")
def test_it_changes_no_token(case: dict[str, Any], plainly: Plainly, loaded_pair: LocalPair) -> None:
    body = body_of(case)
    expected = plainly(body)
    loaded_pair.reset(own_draft=True)
    outcome = loaded_pair.run({"a": body})["a"]
    assert_equal(outcome, expected)
    assert not outcome.rejected


@given(seed=st.integers(0, 2**32), chosen=st.lists(st.integers(0, 99), min_size=2, max_size=5))
@examples
def test_many_sessions_that_are_suspended_at_random_keep_their_tokens(
    loaded_pair: LocalPair, plainly: Plainly, seed: int, chosen: list[int]
) -> None:
    opens = {str(i): body_of(CASES[index % len(CASES)]) for i, index in enumerate(chosen)}
    loaded_pair.reset(own_draft=True)
    outcomes = loaded_pair.run(opens, gate=Erratic(seed), verify_all=random.Random(seed).random() < 0.5)
    assert_all_equal(outcomes, opens, plainly)


@given(seed=st.integers(0, 2**32))
@settings(examples, max_examples=4)
def test_preemption_of_either_model_changes_no_token(tight_pair: LocalPair, plainly: Plainly, seed: int) -> None:
    opens = {str(i): body_of({"prompt": i % 4, "temperature": seed % 2, "seed": seed % 99 + i}) for i in range(6)}
    tight_pair.reset(own_draft=True)
    outcomes = tight_pair.run(opens)
    tight_pair.reset()
    assert_all_equal(outcomes, opens, plainly)


def test_it_is_at_work_and_a_proposal_is_at_hand_for_nearly_every_step(own: LocalPair) -> None:
    opens = {str(i): open_session(prompts()[i][:40], max_tokens=64, ignore_eos=True) for i in range(3)}
    outcomes = own.run(opens).values()
    assert sum(outcome.num_accepted for outcome in outcomes) > 64
    verdicts = [verdict for outcome in outcomes for verdict in outcome.verdicts[1:]]
    assert sum(bool(verdict.verified_by_depth) for verdict in verdicts) > 0.8 * len(verdicts)
    assert all(verdict.hold_off_us > 0 for verdict in verdicts if verdict.verified_by_depth)


def test_a_session_that_is_suspended_and_goes_on_is_drafted_for_again(own: LocalPair) -> None:
    opens = {str(i): open_session(prompts()[i][:40], max_tokens=96, ignore_eos=True) for i in range(3)}
    for outcome in own.run(opens, gate=Spiteful()).values():
        assert any(verdict.suspends_draft for verdict in outcome.verdicts)
        assert outcome.num_accepted > 10


def test_rejection_mode_keeps_the_targets_distribution(loaded_pair: LocalPair) -> None:
    """The false-alarm rate is 1e-6."""
    check_distribution(loaded_pair, REJECTION, 768, own_draft=True)
    loaded_pair.reset()


def test_proposals_from_elsewhere_are_not_used(own: LocalPair) -> None:
    body = open_session(prompts()[0][:30], max_tokens=24, ignore_eos=True, body={"max_draft_tokens": 8})
    nonsense = pb.Proposal(start_position=0, token_ids=[1 << 30]).SerializeToString()
    outcome = own.run({"a": body}, propose=lambda session_id, tokens: [nonsense])["a"]
    assert not outcome.rejected
    assert outcome.num_accepted > 0


def test_a_draft_hears_of_all_tokens_at_once_when_it_is_asked_again(
    own: LocalPair, plainly: Plainly, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = body_of({"prompt": 1, "temperature": 0.0})
    expected = plainly(body)
    own.reset(own_draft=True)
    turns, told = iter(range(10_000)), list[int]()
    monkeypatch.setattr(Expectations, "is_worth_asking", lambda *_: next(turns) % 5 == 4)
    commit = own.local_draft.commit
    monkeypatch.setattr(
        own.local_draft, "commit", lambda *args, suspend: told.append(len(args[2])) or commit(*args, suspend=suspend)
    )
    outcome = own.run({"a": body})["a"]
    assert_equal(outcome, expected)
    assert outcome.num_accepted > 0
    assert min(told[1:-1]) >= 5


def test_the_time_that_prompts_take_is_told_chunk_by_chunk_and_only_that(own: LocalPair) -> None:
    gate = Bookkeeping()
    body = open_session((prompts()[0] * 30)[:700], max_tokens=48, ignore_eos=True, body={"cache_salt": b"all of it"})
    own.run({"a": body}, gate=gate)
    chunk_tokens = own.draft_settings.rows_of_step("cpu")
    assert len(gate.invested_s) == -(-700 // chunk_tokens) > 1
    assert min(gate.invested_s) > 0
    assert gate.excused_s == pytest.approx(sum(gate.invested_s)), "it is no part of what a step is judged by"


def test_a_draft_that_raises_costs_nobody_a_token_and_is_left_alone_in_the_end(
    own: LocalPair, plainly: Plainly, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = [body_of({"prompt": i, "temperature": 0.0}) for i in range(3)]
    expected = [plainly(body) for body in bodies]
    own.reset(own_draft=True)
    engine = own.draft_built.engine

    def broken(only: object = None) -> bool:
        raise KVInvariantError("broken on purpose")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "launch", broken)
        for body, wanted in zip(bodies, expected, strict=True):
            outcome = own.run({"a": body})["a"]
            assert_equal(outcome, wanted)
            assert outcome.num_verified == 0
    assert own.local_draft.is_off
    assert own.run({"a": bodies[0]})["a"].num_verified == 0


def test_a_draft_whose_logits_are_no_numbers_is_not_used_for_that_session(
    own: LocalPair, plainly: Plainly, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = body_of({"prompt": 1, "temperature": 1.0})
    expected = plainly(body)
    own.reset(own_draft=True)
    engine = own.draft_built.engine
    collect = engine.collect

    def spoilt() -> StepOutput:
        output = collect()
        output.logits.fill_(torch.nan)
        return output

    monkeypatch.setattr(engine, "collect", spoilt)
    outcome = own.run({"a": body})["a"]
    assert_equal(outcome, expected)
    assert outcome.num_verified == 0
    assert not own.local_draft.is_off


def test_a_prompt_that_is_too_long_for_the_draft_is_decoded_plainly(plainly: Plainly) -> None:
    body = body_of({"prompt": 3, "temperature": 0.0})
    expected = plainly(body)
    short = LocalPair(draft_options={"max_model_len": len(body.token_ids) - 1})
    short.reset(own_draft=True)
    outcome = short.run({"a": body})["a"]
    assert_equal(outcome, expected)
    assert outcome.num_verified == 0


def test_what_is_not_known_of_a_session_is_no_fault(own: LocalPair) -> None:
    draft: LocalDraft = own.local_draft
    draft.commit("unknown", 0, [1], suspend=False)
    draft.close_session("unknown")
    assert not draft.is_off


def test_a_session_that_is_suspended_from_the_start_is_never_opened_at_the_draft(own: LocalPair) -> None:
    class Closed(Spiteful):
        def is_open(self, state: GateState | None) -> bool:
            return False

    before = own.draft_built.engine.stats().prefix_query_tokens
    opens = {str(i): open_session(prompts()[i][:40], max_tokens=24, ignore_eos=True) for i in range(3)}
    assert all(outcome.num_verified == 0 for outcome in own.run(opens, gate=Closed()).values())
    assert own.draft_built.engine.stats().prefix_query_tokens == before
