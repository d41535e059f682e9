"""Whatever raises for one session ends that one; all others go on with the same tokens, and so does the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from specdec.drafting.role.guess import Guesser, Place
from specdec.drafting.role.session import Guess
from specdec.engine.errors import KVInvariantError
from specdec.replica.ranks.watch import RankLost
from specdec.replica.worker.errors import FaultLog, SessionFailure
from specdec.replica.worker.isolation import each_or_halves
from specdec.target_service import committing, stepping
from specdec.target_service.pacing.pacing import Pacing
from specdec.v1 import common_pb2 as pb
from tests.fuzz.links.worker import open_body, tiny_local_pair
from tests.support.engine.local_pair import LocalPair
from tests.support.engine.outcomes import Outcome
from tests.support.engine.worker_client import WorkerClient, reason_of

POISON = 7
"""A token that only the guilty session's prompt has."""
PROMPTS = {"a": [11, 12, 13, 14], "guilty": [21, 22, POISON, 24], "b": list(range(30, 60))}


def opens(*, speculate: bool = False) -> dict[str, pb.OpenSession]:
    return {
        name: pb.OpenSession(
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=pb.TokenSampling(
                temperature=1.0, top_p=1.0, repetition_penalty=1.0, max_tokens=24, ignore_eos=True, seed=3,
                logit_bias={POISON: -100},
            ),
            speculate=speculate,
            credit_position=1000,
        )
        for name, prompt in PROMPTS.items()
    }  # fmt: skip


def raise_for_poison(runner: Any, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
    forward = runner.forward

    def raising(batch: Any) -> torch.Tensor:
        if POISON in batch.input_ids.tolist():
            raise error or ValueError("poison")
        result: torch.Tensor = forward(batch)
        return result

    monkeypatch.setattr(runner, "forward", raising)


def check(outcomes: dict[str, Outcome], undisturbed: dict[str, Outcome]) -> None:
    error = outcomes["guilty"].error
    assert error is not None
    assert reason_of(error.status) == "SESSION_FAULT"
    for name in ("a", "b"):
        assert outcomes[name].error is None
        assert outcomes[name].token_ids == undisturbed[name].token_ids


def grant(pair: LocalPair) -> None:
    """Give credit to whoever has begun."""
    for session_id in sorted(pair.live):
        if num_output := pair.num_output(session_id):
            position = len(PROMPTS[session_id]) + num_output + 8
            pair.send_entry(session_id, credit=pb.Credit(position=position))


@pytest.fixture(scope="module")
def pair() -> LocalPair:
    return LocalPair()


def fresh(pair: LocalPair) -> LocalPair:
    pair.reset()
    return pair


@pytest.mark.parametrize("use_draft", [False, True], ids=["plain", "drafted"])
def test_a_step_that_raises_for_one_session_costs_the_others_nothing(
    pair: LocalPair, monkeypatch: pytest.MonkeyPatch, use_draft: bool
) -> None:
    undisturbed = fresh(pair).run(opens(), use_draft=False)
    fresh(pair)
    raise_for_poison(pair.target_built.engine.runner, monkeypatch)
    check(pair.run(opens(speculate=use_draft), use_draft=use_draft), undisturbed)


@pytest.mark.parametrize(("module", "share"), [(stepping, "decide"), (committing, "make_verdict")])
def test_a_share_that_raises_for_one_session_costs_the_others_nothing(
    pair: LocalPair, monkeypatch: pytest.MonkeyPatch, module: Any, share: str
) -> None:
    undisturbed = fresh(pair).run(opens(), use_draft=False)
    original: Callable[..., Any] = getattr(module, share)

    def raising(what: Any, *rest: Any) -> Any:
        candidates = what if isinstance(what, list) else [what.candidate]
        for candidate in candidates:
            if candidate.session.session_id == "guilty" and candidate.session.num_tokens > 10:
                raise ZeroDivisionError
        return original(what, *rest)

    monkeypatch.setattr(module, share, raising)
    check(fresh(pair).run(opens(), use_draft=False), undisturbed)


@pytest.mark.parametrize("share", ["plan", "choose_trees"])
def test_a_pacing_that_raises_costs_speculation_only(
    pair: LocalPair, monkeypatch: pytest.MonkeyPatch, share: str
) -> None:
    bodies = opens(speculate=True)
    for body in bodies.values():
        body.num_prompt_logprobs = 2
        body.credit_position = 1  # the first token needs none
    undisturbed = fresh(pair).run(bodies, each_turn=grant)

    def raising(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Pacing, share, raising)
    outcomes = fresh(pair).run(bodies, each_turn=grant)
    for name, outcome in outcomes.items():
        assert outcome.error is None
        assert outcome.num_verified == 0
        assert outcome.token_ids == undisturbed[name].token_ids
        assert outcome.origins[0] == pb.ORIGIN_PREFILL
        assert len(outcome.verdicts[0].prompt_logprobs) == len(PROMPTS[name]) - 1


def test_a_draft_that_raises_for_one_session_drafts_on_for_the_others(
    pair: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = fresh(pair).run(opens(), use_draft=False)
    fresh(pair)
    raise_for_poison(pair.draft_built.engine.runner, monkeypatch)
    outcomes = pair.run(opens(speculate=True))
    assert {name: outcome.token_ids for name, outcome in outcomes.items()} == {
        name: outcome.token_ids for name, outcome in undisturbed.items()
    }
    assert [reason_of(error.status) for error in outcomes["guilty"].draft_errors] == ["SESSION_FAULT"]
    assert not outcomes["a"].draft_errors
    assert not outcomes["b"].draft_errors
    assert outcomes["b"].num_verified > 0


def test_an_engine_that_fails_for_everyone_ends(pair: LocalPair, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh(pair)

    def broken(_batch: Any) -> torch.Tensor:
        raise ValueError("no device")

    monkeypatch.setattr(pair.target_built.engine.runner, "forward", broken)
    with pytest.raises(ValueError, match="no device"):
        pair.run(opens(), use_draft=False)
    monkeypatch.undo()
    fresh(pair)


@pytest.mark.parametrize(
    "error",
    [
        KVInvariantError("bug"),
        MemoryError(),
        RuntimeError("CUDA error: lost"),
    ],
)
def test_what_is_the_engines_own_is_no_sessions_fault(error: Exception) -> None:
    def run(_items: list[int]) -> list[int]:
        raise error

    with pytest.raises(type(error)):
        each_or_halves([1, 2], run, lambda *_: None)
    with pytest.raises(type(error)):
        FaultLog().failure(error)
    with pytest.raises(type(error)):
        FaultLog().note(error)


def test_a_lost_rank_is_no_fault_that_isolation_sees() -> None:
    def run(_items: list[int]) -> list[int]:
        raise RankLost("rank 1 was killed by SIGKILL")

    with pytest.raises(RankLost):
        each_or_halves([1], run, lambda *_: None)


NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=["allocator", "driver", "library"])
def test_too_little_memory_for_one_session_costs_the_others_nothing_and_frees_graphs(
    pair: LocalPair, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    undisturbed = fresh(pair).run(opens(), use_draft=False)
    fresh(pair)
    released: list[int] = []
    engine = pair.target_built.engine
    before = engine.stats().memory_faults
    monkeypatch.setattr(engine.runner, "release_memory", lambda: released.append(1))
    raise_for_poison(engine.runner, monkeypatch, error)
    outcomes = pair.run(opens(), use_draft=False)
    failure = outcomes["guilty"].error
    assert failure is not None
    assert reason_of(failure.status) == "OUT_OF_DEVICE_MEMORY"
    assert {name: outcomes[name].token_ids for name in "ab"} == {name: undisturbed[name].token_ids for name in "ab"}
    assert engine.stats().memory_faults - before == len(released) > 0


def test_an_engine_whose_device_has_no_memory_for_three_sessions_in_a_row_ends(
    pair: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh(pair)

    def full(_batch: Any) -> torch.Tensor:
        raise NO_MEMORY[0]

    monkeypatch.setattr(pair.target_built.engine.runner, "forward", full)
    with pytest.raises(torch.OutOfMemoryError):
        pair.run(opens(), use_draft=False)
    monkeypatch.undo()
    fresh(pair)


def test_failures_that_are_typed_already_stay_as_they_are() -> None:
    failure = SessionFailure(3, "COMMIT_GAP", "a gap")
    assert FaultLog().failure(failure) is failure


def test_halving_finds_all_who_are_at_fault() -> None:
    told: list[int] = []

    def run(items: list[int]) -> list[int]:
        if {3, 4} & set(items):
            raise ValueError
        return items

    assert each_or_halves(list(range(9)), run, lambda item, _: told.append(item)) == [0, 1, 2, 5, 6, 7, 8]
    assert told == [3, 4]


def test_a_drafts_session_with_several_heads_for_whose_guess_something_raises_ends_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = WorkerClient(tiny_local_pair(), "draft")
    client.attach()
    client.entry("bad", open=open_body(fork_from="", max_draft_tokens=8))
    guesser = client.role._guesser  # type: ignore[attr-defined]
    num_heads: list[int] = []

    class Raising(Guesser):
        def guess(self, places: Sequence[Place], logits: torch.Tensor) -> list[Guess | None]:
            num_heads.append(len(places))
            if max(num_heads) > 1:
                raise ValueError("poison")
            return super().guess(places, logits)

    raising = Raising(guesser.sampler, guesser.num_siblings, guesser.num_sparse)
    monkeypatch.setattr(client.role, "_guesser", raising)
    client.turn(40)
    assert max(num_heads) > 1
    assert client.session("bad") is None
    (error,) = client.take("error", "bad")
    assert reason_of(error.status) == "SESSION_FAULT"
