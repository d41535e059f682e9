"""Drafters at the target, each alone and in random sets, give the tokens of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.config.drafter_options import (
    DrafterOptions,
    LookaheadOptions,
    NgramOptions,
    PredictionOptions,
    SuffixOptions,
)
from specdec.drafting.interface import Capabilities, Context, Offer, Room
from specdec.drafting.registry import make_drafter
from specdec.target_service.pacing.expectations import Expectations
from specdec.target_service.policy.marginal_gains import Headroom
from specdec.target_service.policy.step_time import StepTimeModel
from specdec.v1 import common_pb2 as pb
from tests.support.engine.fickle_gates import Erratic, Spiteful
from tests.support.engine.local_pair import LocalPair, open_session, prompts
from tests.unit.lossless.cases import CASES
from tests.unit.lossless.sessions import Plainly, assert_all_equal, assert_equal, body_of, examples, many_examples

EVERY: dict[str, DrafterOptions] = {
    "ngram": NgramOptions(prompt_lookup_min=1),
    "suffix": SuffixOptions(),
    "prediction": PredictionOptions(),
    "lookahead": LookaheadOptions(),
}


@pytest.fixture
def restored(loaded_pair: LocalPair) -> Iterator[LocalPair]:
    yield loaded_pair
    loaded_pair.reset()


def with_prediction(body: pb.OpenSession, rng: random.Random, plain: list[int]) -> pb.OpenSession:
    """The body with a prediction that is the plain output with some tokens replaced, left out and put in."""
    changed: list[int] = []
    for token in plain:
        dice = rng.random()
        if dice < 0.85:
            changed.append(token)
        elif dice < 0.9:
            changed += [token, rng.randrange(1000)]
        elif dice < 0.95:
            changed.append(rng.randrange(1000))
    made = pb.OpenSession()
    made.CopyFrom(body)
    made.prediction_token_ids.extend(changed)
    return made


def check_set(
    pair: LocalPair, plainly: Plainly, names: list[str], cases: list[dict[str, Any]], text: random.Random, **how: Any
) -> dict[str, Any]:
    bodies = {str(i): body_of(case) for i, case in enumerate(cases)}
    expected = {key: plainly(body) for key, body in bodies.items()}
    opens = {key: with_prediction(body, text, expected[key].token_ids) for key, body in bodies.items()}
    pair.reset(own_draft=how.pop("own_draft", False), drafters=[EVERY[name] for name in names])
    outcomes = pair.run(opens, **how)
    for key, outcome in outcomes.items():
        assert_equal(outcome, expected[key])
        assert not outcome.rejected
        assert len(outcome.accepted_by) in (0, outcome.num_accepted)
    assert pair.verifier.local_drafters.names == names
    return outcomes


@pytest.mark.smoke
@pytest.mark.parametrize("name", EVERY)
def test_each_alone_changes_no_token_over_the_table_and_is_accepted_sometimes(
    name: str, restored: LocalPair, plainly: Plainly
) -> None:
    num_accepted = 0
    for first in range(0, len(CASES), 8):
        outcomes = check_set(restored, plainly, [name], CASES[first : first + 8], random.Random(first), use_draft=False)
        num_accepted += sum(outcome.num_of(name, "num_accepted") for outcome in outcomes.values())
        assert {each for outcome in outcomes.values() for each in outcome.accepted_by} <= {name}
    assert num_accepted > 0


@given(seed=st.integers(0, 2**32), names=st.sets(st.sampled_from(sorted(EVERY)), min_size=2))
@examples
def test_random_sets_beside_a_draft_change_no_token(
    restored: LocalPair, plainly: Plainly, seed: int, names: set[str]
) -> None:
    check_random_set(restored, plainly, seed, names)


@pytest.mark.parametrize("seed", range(4))
def test_whoever_is_asked_and_in_whatever_order_changes_no_token(
    seed: int, restored: LocalPair, plainly: Plainly, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both depend on how long calls take: here on the dice."""
    dice = random.Random(seed)
    monkeypatch.setattr(Expectations, "is_worth_asking", lambda expectations, source, asks, cost_s: dice.random() < 0.6)
    monkeypatch.setattr(Expectations, "worth_per_s", lambda expectations, source, cost_s, limit: dice.random())
    rng = random.Random(seed)
    for own_draft in (False, True):
        check_set(
            restored, plainly, sorted(EVERY), rng.sample(CASES, 6), rng, rng=rng, own_draft=own_draft, hold_off_ms=0.0
        )


def test_a_call_that_offered_nothing_is_judged_with_its_step(restored: LocalPair) -> None:
    """Kept for later it would be held against another step's tree."""
    restored.reset(drafters=[EVERY["ngram"]])
    num_asked: list[int] = []

    def count(pair: LocalPair) -> None:
        num_asked.extend(len(session.drafter_calls) for session in pair.target_host.sessions)

    body = open_session(list(range(100, 130)), max_tokens=40, ignore_eos=True, temperature=1.0)
    restored.run({"a": body}, use_draft=False, each_turn=count)
    assert len(num_asked) > 10
    assert max(num_asked) <= 1
    assert restored.verifier.steps.pacing.expectations.marginal.expected("ngram", Headroom(8, 8)) < 4.0


@pytest.mark.long
@given(seed=st.integers(0, 2**32), names=st.sets(st.sampled_from(sorted(EVERY)), min_size=1))
@many_examples
def test_many_more_sets_change_no_token(restored: LocalPair, plainly: Plainly, seed: int, names: set[str]) -> None:
    check_random_set(restored, plainly, seed, names)


def check_random_set(pair: LocalPair, plainly: Plainly, seed: int, names: set[str]) -> None:
    rng = random.Random(seed)
    gate = rng.choice([None, Erratic(seed), Spiteful()])
    own_draft = rng.random() < 0.3
    check_set(
        pair,
        plainly,
        sorted(names),
        rng.sample(CASES, 4),
        rng,
        rng=rng,
        own_draft=own_draft,
        use_draft=rng.random() < 0.7,
        gate=gate,
        verify_all=rng.random() < 0.7,
        hold_off_ms=rng.choice([None, 0.0]),
    )


class DearRows(StepTimeModel):
    """A machine on which a row of a step costs a quarter of a plain step, whatever the clock says."""

    def observe(self, num_rows: int, elapsed_s: float) -> None:
        self.base_s, self.row_s = 0.075, 0.025


@pytest.mark.parametrize(("is_dear", "least", "most"), [(False, 0.9, 1.0), (True, 0.0, 0.3)])
def test_lookahead_is_asked_less_where_its_windows_rows_cost_more_than_it_brings(
    restored: LocalPair, plainly: Plainly, is_dear: bool, least: float, most: float
) -> None:
    body = open_session(prompts()[0], max_tokens=160, ignore_eos=True)
    expected = plainly(body)
    restored.reset(drafters=[EVERY["lookahead"]])

    def price(pair: LocalPair) -> None:
        if is_dear and not isinstance(pair.verifier.steps.pacing.clock.rows, DearRows):
            pair.verifier.steps.pacing.clock.rows = DearRows(base_s=0.075, row_s=0.025)

    outcome = restored.run({"one": body}, use_draft=False, verify_all=not is_dear, each_turn=price)["one"]
    assert_equal(outcome, expected)
    num_asked = sum(any(each.name == "lookahead" for each in verdict.drafters) for verdict in outcome.verdicts)
    assert least <= num_asked / len(outcome.verdicts) <= most


def test_a_session_may_name_those_that_propose_for_it(restored: LocalPair, plainly: Plainly) -> None:
    body = open_session(prompts()[0][:40] * 2, max_tokens=40, ignore_eos=True)
    expected = plainly(body)
    restored.reset(drafters=[EVERY["ngram"], EVERY["suffix"], EVERY["lookahead"]])
    opens = {}
    for key, names in {"all": [], "one": ["suffix", "unheard_of"], "none": ["draft_model"]}.items():
        opens[key] = pb.OpenSession()
        opens[key].CopyFrom(body)
        opens[key].drafters.extend(names)
    outcomes = restored.run(opens, use_draft=False)
    for outcome in outcomes.values():
        assert_equal(outcome, expected)
    asked = {key: {record.name for v in outcome.verdicts for record in v.drafters} for key, outcome in outcomes.items()}
    assert asked == {"all": {"ngram", "suffix", "lookahead"}, "one": {"suffix"}, "none": set()}
    assert outcomes["none"].num_verified == 0


def test_drafters_come_and_go_while_sessions_run(restored: LocalPair, plainly: Plainly) -> None:
    opens = {str(i): body_of({"prompt": i, "temperature": float(i % 2), "max_tokens": 60}) for i in range(4)}
    for body in opens.values():
        plainly(body)
    restored.reset(drafters=[EVERY["ngram"]])
    rng = random.Random(3)

    def disturb(pair: LocalPair) -> None:
        name = rng.choice(sorted(EVERY))
        if rng.random() < 0.5:
            pair.verifier.local_drafters.remove(name)
        elif name not in pair.verifier.local_drafters.names:
            pair.verifier.local_drafters.add(name, make_drafter(EVERY[name]))

    outcomes = restored.run(opens, use_draft=False, each_turn=disturb)
    assert_all_equal(outcomes, opens, plainly)
    names = {record.name for outcome in outcomes.values() for v in outcome.verdicts for record in v.drafters}
    assert len(names) > 2


def test_one_that_copies_the_prompt_decodes_a_repeated_text_in_far_fewer_steps(
    restored: LocalPair, plainly: Plainly
) -> None:
    body = open_session(prompts()[0][:40], max_tokens=64, ignore_eos=True)
    expected = plainly(body)
    body.prediction_token_ids.extend(expected.token_ids)
    restored.reset(drafters=[EVERY["prediction"]])
    outcome = restored.run({"a": body}, use_draft=False)["a"]
    assert_equal(outcome, expected)
    assert len(outcome.verdicts) <= 1 + -(-63 // 9) + 1
    assert outcome.num_of("prediction", "num_accepted") == outcome.num_accepted
    assert set(outcome.accepted_by) == {"prediction"}


class Failing:
    """A drafter that fails at its third call."""

    name = "failing"
    capabilities = Capabilities()

    def __init__(self, fail: Callable[[], Offer | None]) -> None:
        self._fail = fail
        self.num_calls = 0

    def open(self, context: Context) -> Failing:
        return self

    def close(self, context: Context) -> None:
        pass

    def propose(self, context: Context, room: Room) -> Offer | None:
        self.num_calls += 1
        return self._fail() if self.num_calls >= 3 else Offer([context.token_ids[-1]], [-1], [0.5])


def raises() -> Offer:
    raise RuntimeError("broken on purpose")


def never_returns() -> Offer:
    try:
        while True:
            pass
    except Exception:  # what ends it is not for it to catch
        return Offer([1], [-1], [1.0])


FAILURES: dict[str, Callable[[], Offer | None]] = {
    "raises": raises,
    "never returns": never_returns,
    "an id outside the vocabulary": lambda: Offer([1 << 40], [-1], [0.5]),
    "a negative id": lambda: Offer([-1], [-1], [0.5]),
    "a parent after its child": lambda: Offer([1, 2], [1, -1], [0.5, 0.5]),
    "lists of unequal length": lambda: Offer([1, 2], [-1, 0], [0.5]),
    "too many nodes": lambda: Offer([1] * 65, list(range(-1, 64)), [0.5] * 65),
    "a score that is no number": lambda: Offer([1], [-1], [float("nan")]),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_one_that_fails_is_dropped_for_good_and_costs_nobody_a_token(
    failure: str, restored: LocalPair, plainly: Plainly
) -> None:
    opens = {str(i): body_of({"prompt": i, "temperature": float(i % 2)}) for i in range(3)}
    for body in opens.values():
        plainly(body)
    restored.reset(drafters=[EVERY["ngram"]])
    failing = Failing(FAILURES[failure])
    restored.verifier.local_drafters.add(failing.name, failing)
    outcomes = restored.run(opens, use_draft=False)
    assert_all_equal(outcomes, opens, plainly)
    assert restored.verifier.local_drafters.names == ["ngram"]
    assert failing.num_calls == 3
    dropped = restored.target_registry.get_sample_value("specdec_target_drafters_dropped_total", {"drafter": "failing"})
    assert dropped == 1
    assert any(outcome.num_of("ngram", "num_proposed") for outcome in outcomes.values())


def test_a_draft_in_the_target_is_not_run_where_a_prediction_says_it_all(restored: LocalPair, plainly: Plainly) -> None:
    body = open_session(prompts()[0][:40], max_tokens=96, ignore_eos=True)
    expected = plainly(body)
    restored.reset(own_draft=True, drafters=[EVERY["prediction"]])
    unhelped = restored.run({"a": body})["a"]
    assert unhelped.num_accepted > 30
    restored.reset(own_draft=True, drafters=[EVERY["prediction"]])
    body.prediction_token_ids.extend(expected.token_ids)
    helped = restored.run({"a": body})["a"]
    assert_equal(helped, expected)
    assert helped.accepted_by.count("draft_model") < unhelped.num_accepted / 4
    assert helped.accepted_by.count("prediction") > 60
