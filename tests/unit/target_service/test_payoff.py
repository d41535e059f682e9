"""Whether speculation pays: against a table of steps, and on the real target."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from specdec.target_service.policy.payoff import Payoff, PlainSteps, step_payoff
from specdec.target_service.policy.step_time import StepTimeModel
from specdec.v1 import common_pb2 as pb
from tests.support.engine.local_pair import LocalPair, chain, open_session, prompts

PLAIN_STEP_S = 0.011


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
    payoff = step_payoff(PLAIN_STEP_S, num_committed, turn_s, held_s)
    assert payoff.decode_s == pytest.approx(decode_s)
    assert payoff.plain_s == pytest.approx(plain_s)


def test_the_speed_up_is_the_ratio_of_the_sums() -> None:
    steps = [step_payoff(PLAIN_STEP_S, [n], 0.016, 0.0) for n in (1, 5, 2)]
    total = Payoff(sum(step.decode_s for step in steps), sum(step.plain_s for step in steps))
    assert total.plain_s / total.decode_s == pytest.approx(8 * 0.011 / (3 * 0.016))


@pytest.mark.parametrize("is_quiet", [True, False])
def test_a_plain_step_takes_what_it_took_last_and_until_then_what_the_model_expects(is_quiet: bool) -> None:
    step_time, plain_steps = StepTimeModel(base_s=0.010, row_s=0.001), PlainSteps()
    assert plain_steps.expected_s(4, step_time, is_quiet) == pytest.approx(0.014)
    plain_steps.observe(4, 0.005, is_quiet)
    assert plain_steps.expected_s(4, step_time, is_quiet) == pytest.approx(0.005)
    assert plain_steps.expected_s(5, step_time, is_quiet) == pytest.approx(0.015)
    for _ in range(60):
        plain_steps.observe(4, 0.006, is_quiet)
    assert plain_steps.expected_s(4, step_time, is_quiet) == pytest.approx(0.006, rel=0.01)


def test_one_plain_step_that_stalled_hardly_counts() -> None:
    step_time, plain_steps = StepTimeModel(), PlainSteps()
    plain_steps.observe(1, 0.005, False)
    plain_steps.observe(1, 10.0, False)
    assert plain_steps.expected_s(1, step_time, False) < 0.007


def test_steps_that_a_draft_slowed_down_are_corrected_by_those_it_did_not() -> None:
    """A draft on the same machine slows plain steps by a quarter: at batch sizes without quiet steps as well."""
    step_time, plain_steps = StepTimeModel(base_s=0.018, row_s=0.001), PlainSteps()
    for num_sessions in (1, 4):
        for _ in range(60):
            plain_steps.observe(num_sessions, 0.010 * num_sessions, False)
    assert plain_steps.expected_s(4, step_time, False) == pytest.approx(0.040), "nothing is known of quiet steps yet"
    for _ in range(60):
        plain_steps.observe(1, 0.008, True)
    assert plain_steps.expected_s(1, step_time, False) == pytest.approx(0.008, rel=0.01)
    assert plain_steps.expected_s(4, step_time, False) == pytest.approx(0.032, rel=0.01)
    assert plain_steps.expected_s(2, step_time, False) == pytest.approx(0.016, rel=0.01)


def test_longer_contexts_in_quiet_steps_are_not_taken_for_a_draft_that_speeds_them_up() -> None:
    step_time, plain_steps = StepTimeModel(), PlainSteps()
    plain_steps.observe(1, 0.010, False)
    plain_steps.observe(1, 0.030, True)
    assert plain_steps.expected_s(1, step_time, False) == pytest.approx(0.010)


@pytest.mark.parametrize("num_quiet_tokens", [0, 40])
def test_on_a_machine_that_the_draft_slows_down_speculation_is_held_against_quiet_steps(
    pair: LocalPair, monkeypatch: pytest.MonkeyPatch, num_quiet_tokens: int
) -> None:
    """Every step takes 10 ms, and 15 ms while the draft works: no proposal is ever right, so that nothing is gained."""
    pair.reset()
    clock = SteppingClock()
    monkeypatch.setattr("specdec.target_service.verifier.time", SimpleNamespace(monotonic=clock))
    pair.target._clock = clock
    launch, prompt = pair.target_built.engine.launch, prompts()[0][:20]

    def timed_launch(*arguments: object) -> object:
        clock.now_s += 0.015 if clock.is_draft_at_work else 0.010
        return launch(*arguments)

    monkeypatch.setattr(pair.target_built.engine, "launch", timed_launch)
    if num_quiet_tokens:
        quiet = open_session(prompt, max_tokens=num_quiet_tokens, ignore_eos=True, body={"speculate": False})
        pair.run({"warm": loud_session(prompt)}, use_draft=False, propose=late_proposals, hold_off_ms=0.0)
        clock.is_draft_at_work = False
        pair.run({"quiet": quiet}, use_draft=False)
        clock.is_draft_at_work = True
    before = value(pair, "decode_seconds_total"), value(pair, "plain_equivalent_seconds_total")
    pair.run({"loud": loud_session(prompt)}, use_draft=False, propose=late_proposals, hold_off_ms=0.0)
    decode_s = value(pair, "decode_seconds_total") - before[0]
    plain_s = value(pair, "plain_equivalent_seconds_total") - before[1]
    assert plain_s / decode_s == pytest.approx(0.67 if num_quiet_tokens else 1.0, abs=0.03)


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
