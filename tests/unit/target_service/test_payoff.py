"""Whether speculation pays: against a table of steps, and on the real target."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from specdec.engine.outputs import StepOutput
from specdec.target_service.records.step_record import Payoff, StepRecord
from specdec.v1 import common_pb2 as pb
from tests.support.engine.local_pair import LocalPair, chain, open_session, prompts

PLAIN_STEP_S = 0.011


def step_payoff(num_committed: list[int], turn_s: float, held_s: float) -> Payoff:
    step = StepRecord(
        output=StepOutput(logits=torch.empty(0), items=[], preempted=[], num_tokens=0),
        preempted=[],
        elapsed_s=turn_s,
        turn_s=turn_s,
        held_s=held_s,
        num_committed=num_committed,
        num_nodes=0,
        are_free=[],
        gates=[],
        is_decode=True,
    )
    payoff = step.payoff(PLAIN_STEP_S)
    assert payoff is not None
    return payoff


@pytest.fixture(scope="module")
def pair() -> LocalPair:
    return LocalPair()


@pytest.mark.parametrize(
    ("num_committed", "turn_s", "held_s", "decode_s", "plain_s"),
    [
        pytest.param([1], 0.011, 0.0, 0.011, 0.011, id="a plain step breaks even"),
        pytest.param([4], 0.015, 0.0, 0.015, 0.044, id="four tokens for one step"),
        pytest.param([4], 0.015, 0.005, 0.020, 0.044, id="the hold-off is charged"),
        pytest.param([1], 0.015, 0.020, 0.035, 0.011, id="nothing accepted after a wait: slower than plain"),
        pytest.param([3, 1], 0.016, 0.004, 0.040, 0.044, id="all sessions of a batch wait"),
        pytest.param([], 0.016, 0.0, 0.0, 0.0, id="no session was decoded"),
    ],
)
def test_a_step_is_held_against_plain_decoding_of_its_batch(
    num_committed: list[int], turn_s: float, held_s: float, decode_s: float, plain_s: float
) -> None:
    payoff = step_payoff(num_committed, turn_s, held_s)
    assert payoff.decode_s == pytest.approx(decode_s)
    assert payoff.plain_s == pytest.approx(plain_s)


def test_the_speed_up_is_the_ratio_of_the_sums() -> None:
    steps = [step_payoff([n], 0.016, 0.0) for n in (1, 5, 2)]
    total = Payoff(sum(step.decode_s for step in steps), sum(step.plain_s for step in steps))
    assert total.plain_s / total.decode_s == pytest.approx(8 * 0.011 / (3 * 0.016))


def test_on_a_machine_that_the_draft_slows_down_speculation_is_held_against_quiet_steps(
    pair: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step takes 10 ms, and 15 ms while the draft works: no proposal is ever right, so that nothing is gained."""
    pair.reset()
    clock = SteppingClock()
    for module in ("verifier", "stepping", "turn_times"):
        monkeypatch.setattr(f"specdec.target_service.{module}.time", SimpleNamespace(monotonic=clock))
    pair.target._clock = clock
    launch, prompt = pair.target_built.engine.launch, prompts()[0][:20]

    def timed_launch(*arguments: object) -> object:
        clock.now_s += 0.015 if clock.is_draft_at_work else 0.010
        return launch(*arguments)

    monkeypatch.setattr(pair.target_built.engine, "launch", timed_launch)
    quiet = open_session(prompt, max_tokens=40, ignore_eos=True, body={"speculate": False})
    clock.is_draft_at_work = False
    pair.run({"quiet": quiet}, use_draft=False)
    clock.is_draft_at_work = True
    before = value(pair, "decode_seconds_total"), value(pair, "plain_equivalent_seconds_total")
    pair.run({"loud": loud_session(prompt)}, use_draft=False, propose=late_proposals, hold_off_ms=0.0)
    decode_s = value(pair, "decode_seconds_total") - before[0]
    plain_s = value(pair, "plain_equivalent_seconds_total") - before[1]
    assert plain_s / decode_s == pytest.approx(0.67, abs=0.03)


def loud_session(prompt: list[int]) -> pb.OpenSession:
    return open_session(prompt, max_tokens=40, ignore_eos=True)


def late_proposals(session_id: str, tokens: list[int]) -> list[bytes]:
    """A draft at work that is always too late: what it proposes is decided already."""
    return [chain(len(tokens) - 1, tokens[-1:])]


class SteppingClock:
    """Time that passes in steps only: nothing may wait for its end."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.is_draft_at_work = True

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("use_draft", [True, False])
def test_the_target_exports_what_its_tokens_took_and_would_have_taken(pair: LocalPair, use_draft: bool) -> None:
    pair.reset()
    opens = {"a": open_session(prompts()[0][:20], max_tokens=40, ignore_eos=True)}
    pair.run(opens, use_draft=use_draft)
    assert value(pair, "decode_seconds_total") > 0
    assert value(pair, "plain_equivalent_seconds_total") > 0
    assert value(pair, "requests_total", outcome="length") == 1


def value(pair: LocalPair, name: str, **labels: str) -> float:
    sample = pair.target_registry.get_sample_value(f"specdec_target_{name}", labels)
    assert sample is not None
    return sample
