"""Masks that are filled on a thread beside the forward pass: the same output, and faults cost who they belong to."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Collection, Iterator, Sequence

import pytest

from specdec.constraints.grammar.follower import NodeMask
from specdec.engine.batch import Batch
from specdec.target_service.masks import MaskFilling, worth_a_thread_s
from specdec.v1 import common_pb2 as pb
from tests.support.engine.constrained import SCHEMAS, TEXTS, check_schema, constrained, plainly, text_of
from tests.support.engine.grammars import json_schema
from tests.support.engine.local_pair import LocalPair
from tests.unit.lossless.sessions import assert_equal


class Watched(MaskFilling):
    """Fills everything on its thread, and counts the sessions' steps that had masks from there."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.num_beside = 0

    def wait(self) -> None:
        self.num_beside += len(self._shares) if self._is_running else 0
        super().wait()


@pytest.fixture
def beside(pair: LocalPair) -> Iterator[LocalPair]:
    pair.verifier.steps.masks = Watched()
    yield pair
    pair.reset()


def filling(pair: LocalPair) -> Watched:
    masks = pair.verifier.steps.masks
    assert isinstance(masks, Watched)
    return masks


# Sampled tokens of rejection mode depend on which drafts came in time.
@pytest.mark.parametrize(
    ("temperature", "mode"),
    [(0.0, pb.VERIFY_MODE_COUPLED), (1.0, pb.VERIFY_MODE_COUPLED), (0.0, pb.VERIFY_MODE_REJECTION)],
)
def test_output_is_that_of_masks_filled_behind_the_pass(
    temperature: float, mode: pb.VerifyMode.ValueType, pair: LocalPair
) -> None:
    bodies = {
        name: constrained(json_schema(SCHEMAS[name]), temperature=temperature, verify_mode=mode, min_tokens=12)
        for name in ("nested", "long names", "further properties", "uuid")
    }
    bodies |= {name: constrained(each, temperature=temperature, verify_mode=mode) for name, each in TEXTS.items()}
    bodies["fork"] = constrained(TEXTS["words"], temperature=temperature, choice=1, body={"fork_from": "words"})
    bodies["fork"].verify_mode = mode
    pair.verifier.steps.masks = MaskFilling(None)
    expected = pair.run(bodies)
    pair.reset()
    pair.verifier.steps.masks = Watched()
    found = pair.run(bodies)
    for session_id, outcome in found.items():
        assert_equal(outcome, expected[session_id])
    assert filling(pair).num_beside > len(bodies)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_preemption_and_any_schedule_change_nothing(temperature: float, tight_pair: LocalPair) -> None:
    bodies = {
        name: constrained(json_schema(SCHEMAS[name]), temperature=temperature, body={"credit_position": 1 << 30})
        for name in ("record", "long names", "nested", "uuid")
    }
    expected = plainly(tight_pair, bodies)
    tight_pair.verifier.steps.masks = Watched()
    for session_id, outcome in tight_pair.run(bodies, rng=random.Random(4)).items():
        assert_equal(outcome, expected[session_id])
    tight_pair.reset()


class Fails:
    """A grammar that cannot be followed any more, for a reason that nobody has thought of."""

    def masks(
        self, token_ids: Sequence[int], parents: Sequence[int], held_back: Sequence[Collection[int]] = ()
    ) -> list[NodeMask]:
        raise ZeroDivisionError("of the test")

    def legal_nodes(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[bool]:
        return [True] * len(token_ids)

    def forced(self, token_ids: Sequence[int] = (), limit: int = 64) -> list[int]:
        return []


def test_an_error_in_filling_ends_its_own_session_only(beside: LocalPair) -> None:
    bodies = {
        "bad": constrained(json_schema(SCHEMAS["nested"])),
        "good": constrained(json_schema(SCHEMAS["record"])),
        "text": constrained(TEXTS["telephone"]),
    }

    def spoil(pair: LocalPair) -> None:
        if "bad" in pair.live and pair.num_output("bad") > 3:
            session = pair.target_host.sessions.get("bad")
            assert session is not None
            session.grammar = Fails()  # type: ignore[assignment]

    found = beside.run(bodies, each_turn=spoil)
    error = found["bad"].error
    assert error is not None
    assert "ZeroDivisionError" in error.status.message
    expected = plainly(beside, {name: bodies[name] for name in ("good", "text")})
    for name, outcome in expected.items():
        assert found[name].token_ids == outcome.token_ids
    check_schema(found["good"], SCHEMAS["record"])


def test_a_step_that_raised_is_run_again_with_masks_of_its_own(
    beside: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = {str(seed): constrained(json_schema(SCHEMAS["nested"]), temperature=1.0, seed=seed) for seed in range(4)}
    expected = plainly(beside, bodies)
    beside.verifier.steps.masks = Watched()
    engine = beside.target_built.engine
    forward, num_raised, num_passes = engine.runner.forward, 0, 0

    def sometimes(batch: Batch) -> object:
        nonlocal num_raised, num_passes
        num_passes += 1
        if num_passes % 5 == 0 and len(engine._in_step or ()) == len(bodies):
            num_raised += 1
            raise ValueError("of the test")
        return forward(batch)

    monkeypatch.setattr(engine.runner, "forward", sometimes)
    found = beside.run(bodies)
    assert num_raised > 1
    for session_id, outcome in found.items():
        assert outcome.error is None
        assert outcome.token_ids == expected[session_id].token_ids


def test_nobody_touches_a_grammar_before_the_thread_is_done_with_it(
    beside: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filling that takes longer than any pass: what ends or commits meanwhile waits for it."""
    body = constrained(TEXTS["telephone"])
    inside = threading.Event()

    def slowed(pair: LocalPair) -> None:
        session = pair.target_host.sessions.get("a")
        if session is None or session.grammar is None or hasattr(session.grammar, "is_slowed"):
            return
        grammar = session.grammar
        masks, commit = grammar.masks, grammar.commit

        def slow_masks(*args: object) -> list[NodeMask]:
            inside.set()
            began_s = time.monotonic()
            while time.monotonic() - began_s < 0.01:
                pass
            found = masks(*args)  # type: ignore[arg-type]
            inside.clear()
            return found

        def checked_commit(token_ids: Sequence[int]) -> None:
            assert not inside.is_set()
            commit(token_ids)

        monkeypatch.setattr(grammar, "masks", slow_masks)
        monkeypatch.setattr(grammar, "commit", checked_commit)
        monkeypatch.setattr(grammar, "is_slowed", True, raising=False)

    outcome = beside.run({"a": body}, use_draft=False, each_turn=slowed)["a"]
    assert outcome.error is None
    assert len(text_of(outcome)) == 14


def test_a_thread_is_there_only_where_it_can_run_beside_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    assert worth_a_thread_s("cpu")
    assert worth_a_thread_s("cuda:0") is None
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    assert worth_a_thread_s("cpu") is None


@pytest.mark.parametrize("worth_s", [0.0, None])
def test_the_time_of_masks_is_told_of_the_steps_that_had_some(worth_s: float | None, pair: LocalPair) -> None:
    def num_steps(name: str) -> float | None:
        return pair.target_registry.get_sample_value(f"specdec_target_{name}_seconds_count")

    free = constrained(pb.Constraint(), max_tokens=10)
    free.sampling.ClearField("constraint")
    pair.verifier.steps.masks = MaskFilling(worth_s)
    pair.run({"a": free}, use_draft=False)
    assert num_steps("mask") == 0
    outcome = pair.run({"a": constrained(json_schema(SCHEMAS["nested"]))}, use_draft=False)["a"]
    assert num_steps("mask") == num_steps("mask_wait") == len(outcome.verdicts)
    pair.reset()


def test_few_cheap_masks_wake_no_thread_and_its_thread_ends_with_the_filling(pair: LocalPair) -> None:
    bodies = {"a": constrained(json_schema(SCHEMAS["nested"]))}
    pair.verifier.steps.masks = MaskFilling(10.0)
    pair.run(bodies)
    assert pair.verifier.steps.masks._jobs is None
    pair.reset()
    pair.verifier.steps.masks = MaskFilling(0.0)
    pair.run(bodies)
    thread = [thread for thread in threading.enumerate() if thread.name == "masks"][-1]
    assert thread.is_alive()
    pair.verifier.steps.masks = MaskFilling(None)
    thread.join(10.0)
    assert not thread.is_alive()
