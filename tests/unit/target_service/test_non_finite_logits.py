"""A model that gives NaN or infinity for one session ends that one, by its own reason; others lose nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.rpc import code_pb2

from specdec.engine.outputs import ItemOutput, StepOutput
from specdec.v1 import common_pb2 as pb
from tests.support.engine.exact_runner import evict_all
from tests.support.engine.local_pair import LocalPair, chain, open_session, prompts
from tests.support.engine.outcomes import Outcome
from tests.support.engine.worker_client import reason_of

HOLD_MS = 60_000.0  # every round waits for its draft
NUM_GOOD_TOKENS = 6
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 1.0, "num_logprobs": 2},
    "cut": {"temperature": 1.0, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.2},
    "rejection": {"temperature": 1.0, "verify_mode": pb.VERIFY_MODE_REJECTION},
}
Spoil = Callable[[str, StepOutput, ItemOutput], None]


@pytest.fixture(scope="module")
def loaded_pair() -> LocalPair:
    return LocalPair()


@pytest.fixture
def pair(loaded_pair: LocalPair, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalPair]:
    loaded_pair.reset()
    yield loaded_pair
    monkeypatch.undo()


def sessions(**options: Any) -> dict[str, pb.OpenSession]:
    body = {"max_draft_tokens": 4, **options.pop("body", {})}
    return {
        name: open_session(prompts()[i][:30], max_tokens=24, ignore_eos=True, seed=i, body=body, **options)
        for i, name in enumerate("abc")
    }


def spoil_rows(pair: LocalPair, role: str, monkeypatch: pytest.MonkeyPatch, spoil: Spoil) -> None:
    """Lets `spoil` write to a copy of the logits of every step, item by item."""
    engine = getattr(pair, f"{role}_built").engine
    collect = engine.collect

    def spoiled() -> StepOutput:
        output: StepOutput = collect()
        output.logits = output.logits.clone()
        for item in output.items:
            spoil(session_id(pair, role, item), output, item)
        return output

    monkeypatch.setattr(engine, "collect", spoiled)


def session_id(pair: LocalPair, role: str, item: ItemOutput) -> str:
    if role == "target":
        return pair.verifier._admission.by_seq[item.seq.seq_id].session_id
    return pair.drafter._branches.owner(item.seq)[0].session_id


def past_the_first_tokens(value: float) -> Spoil:
    """All rows of session b, from some tokens after its prompt on."""

    def spoil(name: str, output: StepOutput, item: ItemOutput) -> None:
        if name == "b" and len(item.seq.token_ids) >= 30 + NUM_GOOD_TOKENS:
            output.logits[item.rows, 5] = value

    return spoil


def is_the_failure(error: pb.SessionError | None) -> bool:
    assert error is not None
    assert "logits" in error.status.message
    return error.status.code == code_pb2.INTERNAL and reason_of(error.status) == "NON_FINITE_LOGITS"


def told(outcome: Outcome) -> tuple[list[int], list[bytes], int]:
    return outcome.token_ids, outcome.logprobs, outcome.finish_reason


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_at_the_target_the_session_alone_fails_and_no_token_of_it_is_made_up(
    pair: LocalPair, monkeypatch: pytest.MonkeyPatch, mode: str, value: float
) -> None:
    undisturbed = pair.run(sessions(**MODES[mode]), hold_off_ms=HOLD_MS)
    pair.reset()
    spoil_rows(pair, "target", monkeypatch, past_the_first_tokens(value))
    outcomes = pair.run(sessions(**MODES[mode]), hold_off_ms=HOLD_MS)
    assert is_the_failure(outcomes["b"].error)
    num_tokens = len(outcomes["b"].token_ids)
    assert NUM_GOOD_TOKENS <= num_tokens < NUM_GOOD_TOKENS + 6
    assert outcomes["b"].token_ids == undisturbed["b"].token_ids[:num_tokens]
    for name in "ac":
        assert outcomes[name].error is None
        assert told(outcomes[name]) == told(undisturbed[name])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_at_the_draft_the_session_alone_loses_its_draft(
    pair: LocalPair, monkeypatch: pytest.MonkeyPatch, mode: str, value: float
) -> None:
    undisturbed = pair.run(sessions(**MODES[mode]), hold_off_ms=HOLD_MS)
    pair.reset()
    spoil_rows(pair, "draft", monkeypatch, past_the_first_tokens(value))
    outcomes = pair.run(sessions(**MODES[mode]))
    [error] = outcomes["b"].draft_errors
    assert is_the_failure(error)
    assert len(outcomes["b"].token_ids) == 24
    for name in "ac":
        assert outcomes[name].draft_errors == []
        assert outcomes[name].num_accepted > 0
    for name in "abc" if mode != "rejection" else "":
        assert told(outcomes[name]) == told(undisturbed[name])


@pytest.mark.parametrize("role", ["target", "draft"])
def test_nothing_that_was_computed_for_the_session_is_taken_from_the_prefix_cache(
    pair: LocalPair, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    engine = getattr(pair, f"{role}_built").engine
    evict_all(engine.block_pool)
    undisturbed = pair.run(sessions(temperature=1.0), hold_off_ms=HOLD_MS)
    evict_all(engine.block_pool)
    pair.reset()
    with monkeypatch.context() as patch:
        spoil_rows(pair, role, patch, past_the_first_tokens(math.nan))
        pair.run(sessions(temperature=1.0), hold_off_ms=HOLD_MS if role == "target" else None)
    pair.reset()
    found: dict[str, int] = {}

    def note(name: str, output: StepOutput, item: ItemOutput) -> None:
        found.setdefault(name, item.seq.num_cached_tokens)

    spoil_rows(pair, role, monkeypatch, note)
    again = pair.run(sessions(temperature=1.0), hold_off_ms=HOLD_MS)
    assert found["b"] == 0
    assert min(found["a"], found["c"]) > 0
    assert {name: told(o) for name, o in again.items()} == {name: told(o) for name, o in undisturbed.items()}


def test_a_prompt_whose_log_probabilities_are_no_numbers_fails_its_session_alone(
    pair: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "body": {"num_prompt_logprobs": 1}}
    undisturbed = pair.run(sessions(**options), use_draft=False)
    evict_all(pair.target_built.engine.block_pool)
    pair.reset()

    def spoil(name: str, output: StepOutput, item: ItemOutput) -> None:
        if name == "b" and item.start == 0:
            output.logits[item.rows.start + 3] = math.nan

    spoil_rows(pair, "target", monkeypatch, spoil)
    outcomes = pair.run(sessions(**options), use_draft=False)
    assert is_the_failure(outcomes["b"].error)
    assert outcomes["b"].token_ids == []
    for name in "ac":
        assert told(outcomes[name]) == told(undisturbed[name])


def test_rows_of_nodes_that_no_walk_comes_to_decide_nothing(pair: LocalPair, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"temperature": 1.0}
    undisturbed = pair.run(sessions(**options), use_draft=False)
    pair.reset()
    num_spoiled = 0

    def spoil(name: str, output: StepOutput, item: ItemOutput) -> None:
        nonlocal num_spoiled
        num_spoiled += item.tree_nodes
        output.logits[item.rows.stop - item.tree_nodes : item.rows.stop] = math.nan

    def wrong(name: str, tokens: list[int]) -> list[bytes]:
        right = undisturbed[name].token_ids[len(tokens) - 30 :]
        return [chain(len(tokens), [(token + 1) % 4096 for token in right[:3]])]

    spoil_rows(pair, "target", monkeypatch, spoil)
    outcomes = pair.run(sessions(**options), use_draft=False, propose=wrong)
    assert num_spoiled > 0
    assert {name: told(o) for name, o in outcomes.items()} == {name: told(o) for name, o in undisturbed.items()}
