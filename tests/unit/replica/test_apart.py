"""Sessions that are to be stepped apart are alone in their steps, take turns with all others, and decide the same."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.replica.worker.isolation import FaultIsolation
from specdec.replica.worker.sessions import EngineSession, Owner
from specdec.v1 import common_pb2 as pb
from specdec.wire.error_details import session_key, split_keys
from tests.support.engine.local_pair import LocalPair, open_session

PROMPTS = {name: [11 + number, 12, 13, 14 + number] for number, name in enumerate("abcde")}
APART = ("b", "d")
NUM_TOKENS = 20
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 1.0},
    "rejection": {"temperature": 1.0, "verify_mode": pb.VERIFY_MODE_REJECTION},
}


@pytest.fixture(scope="module")
def pair() -> LocalPair:
    return LocalPair()


def opens(mode: str, apart: tuple[str, ...] = (), until: int = 1000) -> dict[str, pb.OpenSession]:
    bodies = {
        name: open_session(prompt, max_tokens=NUM_TOKENS, ignore_eos=True, **SAMPLING[mode])
        for name, prompt in PROMPTS.items()
    }
    for name in apart:
        bodies[name].apart_until = until
    return bodies


def noted_steps(pair: LocalPair, role: str, monkeypatch: pytest.MonkeyPatch) -> list[set[bytes]]:
    """The sessions of each step from now on, as its servicer would read them in the middle of it."""
    engine = getattr(pair, f"{role}_built").engine
    steps = getattr(pair, f"{role}_host").steps
    forward, noted = engine.runner.forward, []

    def noting(batch: Any) -> Any:
        noted.append(set(split_keys(steps.read_keys() or b"")))
        return forward(batch)

    monkeypatch.setattr(engine.runner, "forward", noting)
    return noted


def keys(*names: str) -> set[bytes]:
    return {session_key(name) for name in names}


@pytest.mark.parametrize("mode", list(SAMPLING))
def test_sessions_that_step_apart_decide_what_they_would_have_decided(pair: LocalPair, mode: str) -> None:
    pair.reset()
    undisturbed = pair.run(opens(mode), hold_off_ms=60_000, draft_turns=40)
    pair.reset()
    disturbed = pair.run(opens(mode, APART, until=17), hold_off_ms=60_000, draft_turns=40)
    for name in PROMPTS:
        assert len(disturbed[name].token_ids) == NUM_TOKENS
        assert disturbed[name].token_ids == undisturbed[name].token_ids


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_step_is_for_one_session_that_is_apart_or_for_the_others(
    pair: LocalPair, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.reset()
    steps = noted_steps(pair, role, monkeypatch)
    pair.run(opens("coupled", APART), use_draft=role == "draft")
    others = keys(*(set(PROMPTS) - set(APART)))
    assert keys("b") in steps
    assert keys("d") in steps
    assert all(step in (keys("b"), keys("d")) or step <= others for step in steps)


def test_all_get_turns_and_step_together_again_when_they_are_past_the_position(
    pair: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.reset()
    steps = noted_steps(pair, "target", monkeypatch)
    pair.run(opens("greedy", APART, until=len(PROMPTS["b"]) + 6), use_draft=False)
    in_turn = [keys("b"), keys("d"), keys("a", "c", "e")] * 6
    assert steps[:18] == [*in_turn[:17], keys(*PROMPTS)]


def test_whoever_waited_longest_is_next() -> None:
    owner = Owner("coordinator", 1, 1)
    sessions = [EngineSession(session_id=str(n), epoch=1, owner=owner, apart_until=5 * (n % 2)) for n in range(5)]
    turns = FaultIsolation[EngineSession](lambda session: 0)
    taken = []
    for _ in range(9):
        group = turns.groups(sessions)[0]
        turns.take(group)
        taken.append("".join(session.session_id for session in group))
    assert sorted(taken[:3]) == ["024", "1", "3"]
    assert taken[3:6] == taken[6:] == taken[:3]


def test_a_choice_that_is_apart_shares_no_prompt_step_with_another(pair: LocalPair) -> None:
    pair.reset()
    bodies = opens("coupled", ("a",))
    bodies["b"].token_ids[:] = bodies["a"].token_ids
    bodies["b"].fork_from = "a"
    outcomes = pair.run(bodies, use_draft=False)
    assert outcomes["b"].error is None
    assert len(outcomes["b"].token_ids) == NUM_TOKENS
