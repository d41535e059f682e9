"""Whether speculation pays: against a table of steps, and on the real target."""

from __future__ import annotations

import pytest

from target_service.payoff import Payoff, PlainSteps, step_payoff
from target_service.step_time import StepTimeModel
from tests.unit.local_pair import LocalPair, open_session, prompts

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


def test_a_plain_step_takes_what_it_took_last_and_until_then_what_the_model_expects() -> None:
    step_time, plain_steps = StepTimeModel(base_s=0.010, row_s=0.001), PlainSteps()
    assert plain_steps.expected_s(4, step_time) == pytest.approx(0.014)
    plain_steps.observe(4, 0.005)
    assert plain_steps.expected_s(4, step_time) == pytest.approx(0.005)
    assert plain_steps.expected_s(5, step_time) == pytest.approx(0.015)
    for _ in range(60):
        plain_steps.observe(4, 0.006)
    assert plain_steps.expected_s(4, step_time) == pytest.approx(0.006, rel=0.01)


def test_one_plain_step_that_stalled_hardly_counts() -> None:
    step_time, plain_steps = StepTimeModel(), PlainSteps()
    plain_steps.observe(1, 0.005)
    plain_steps.observe(1, 10.0)
    assert plain_steps.expected_s(1, step_time) < 0.007


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
