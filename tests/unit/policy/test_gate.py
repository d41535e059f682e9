"""The gate: decoding with speculation on is never slower than with it off, whatever drafts, prompts and load do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.target_service.policy.gate import SpeculationGate
from specdec.target_service.policy.gate_state import Phase
from specdec.target_service.policy.step_clock import StepClock, load_band
from tests.support.engine.gated_world import Weather, World

BOUND = 0.97
SECONDS = 20.0
GOOD = 2.0
"""Tokens per step; with a cost of 0.3 that is 2.3 times plain decoding."""


def every(period_s: float, now_s: float) -> bool:
    return int(now_s / period_s) % 2 == 0


ADVERSITIES = {
    "a draft that is random": lambda now_s: Weather(0.02, 0.3),
    "one that takes half of the machine": lambda now_s: Weather(0.0, 1.0),
    "one that is too slow to propose": lambda now_s: Weather(0.0, 0.3, answers=False),
    "one that is hardly worth it": lambda now_s: Weather(0.3, 0.28),
    "one that is hardly too bad": lambda now_s: Weather(0.2, 0.25),
    "good, but too dear": lambda now_s: Weather(0.6, 0.8),
    "good, then bad, then good": lambda now_s: Weather(GOOD if every(3, now_s) else 0.0, 0.3),
    "good and bad in quick turns": lambda now_s: Weather(GOOD if every(0.5, now_s) else 0.0, 0.5),
    "a machine that is shared now and then": lambda now_s: Weather(0.5, 0.1 if every(2, now_s) else 1.0),
    "drafts that leave and return": lambda now_s: Weather(GOOD, 0.2, answers=every(1, now_s)),
}


@pytest.mark.smoke
@pytest.mark.parametrize("num_sessions", [1, 8])
@pytest.mark.parametrize("name", ADVERSITIES)
def test_decoding_is_never_slower_than_without_drafts(name: str, num_sessions: int) -> None:
    weather = ADVERSITIES[name]
    for seed in range(2):
        world = World(lambda now_s: replace(weather(now_s), sessions=num_sessions), seed=seed)
        took_s, plain_s = world.run(SECONDS)
        assert plain_s / took_s >= BOUND, seed


@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("length", [40, 100_000])
def test_steps_shorter_than_a_draft_takes_to_stop_are_not_taken_for_plain_ones(length: int, answers: bool) -> None:
    """Nor does it matter that requests end before they could be judged."""
    for seed in range(2):
        world = World(
            lambda now_s: Weather(0.2, 0.6, answers=answers), seed=seed, length=length, step_s=0.0005, lag_s=0.004
        )
        took_s, plain_s = world.run(SECONDS)
        assert plain_s / took_s >= BOUND, seed


@pytest.mark.parametrize("num_sessions", [1, 8])
@pytest.mark.parametrize("accepts", [0.02, 0.3])
def test_prompts_that_are_computed_for_a_bad_draft_do_not_make_decoding_slower(
    accepts: float, num_sessions: int
) -> None:
    """In the target's own time: each takes as long as ten plain steps, and requests have fifty."""
    for seed in range(2):
        world = World(lambda now_s: Weather(accepts, 0.3, num_sessions), prompt_s=0.1, length=50, seed=seed)
        took_s, plain_s = world.run(SECONDS)
        assert plain_s / took_s >= BOUND, seed


@pytest.mark.parametrize("num_sessions", [1, 8])
def test_prompts_are_computed_for_a_draft_that_pays_them_back(num_sessions: int) -> None:
    for seed in range(2):
        world = World(lambda now_s: Weather(GOOD, 0.3, num_sessions), prompt_s=0.05, seed=seed)
        took_s, plain_s = world.run(SECONDS)
        always = replace(world, gate=SpeculationGate(is_gating=False), now_s=0.0)
        took_always_s, plain_always_s = always.run(SECONDS)
        assert plain_s / took_s > 0.93 * plain_always_s / took_always_s > 1.5, seed


@pytest.mark.parametrize(("num_sessions", "prompt_s"), [(32, 0.001), (8, 0.02)])
def test_short_requests_at_a_time_do_not_wait_for_one_anothers_prompts(num_sessions: int, prompt_s: float) -> None:
    """Of fifty tokens; sixteen steps find out whether a request is worth it."""
    for seed in range(2):
        world = World(lambda now_s: Weather(GOOD, 0.3, num_sessions), prompt_s=prompt_s, length=48, seed=seed)
        took_s, plain_s = world.run(SECONDS)
        always = replace(world, gate=SpeculationGate(is_gating=False), now_s=0.0)
        took_always_s, plain_always_s = always.run(SECONDS)
        assert plain_s / took_s > 0.88 * plain_always_s / took_always_s > 1.1, seed


@pytest.mark.parametrize("num_sessions", [1, 8])
def test_requests_whose_contexts_make_steps_longer_are_not_taken_for_dear_drafts(num_sessions: int) -> None:
    """Nor are short ones after them for cheap drafts."""
    for seed in range(2):
        world = World(
            lambda now_s: Weather(0.3, 0.4, num_sessions),
            context_s=lambda number: 0.006 * (number % 2) / num_sessions,
            length=200,
            seed=seed,
        )
        took_s, plain_s = world.run(SECONDS)
        assert plain_s / took_s >= BOUND, seed


def test_a_load_that_comes_and_goes_is_met_by_speculation_where_it_pays() -> None:
    """It pays for one session and not for sixteen, which come and go every two seconds."""
    ratios = []
    for seed in range(3):
        world = World(lambda now_s: Weather(0.6, 0.05) if every(2, now_s) else Weather(0.6, 0.9, 16), seed=seed)
        took_s, plain_s = world.run(SECONDS)
        ratios.append(plain_s / took_s)
    assert min(ratios) >= BOUND
    assert max(ratios) > 1.05


@pytest.mark.parametrize(("num_sessions", "within_s"), [(1, 1.4), (8, 0.95)])
def test_speculation_is_back_within_seconds_of_paying_again(num_sessions: int, within_s: float) -> None:
    """Of one session, a probe that found nothing costs up to 1.3 seconds of the budget's income; then one is due."""
    for seed in range(8):
        weather = [Weather(0.0, 0.3, num_sessions)]
        world = World(lambda _, weather=weather: weather[-1], seed=seed, length=100_000)
        world.run(5.5 + seed / 8)
        assert world.share_speculating(0.05) <= 0.5 or num_sessions == 1
        weather.append(Weather(GOOD, 0.3, num_sessions))
        world.run(within_s)
        assert world.share_speculating(0.5) > 0.7, seed


@pytest.mark.parametrize("num_sessions", [1, 8])
def test_what_pays_is_let_alone(num_sessions: int) -> None:
    """References and judgements cost a good draft at most three parts in a hundred of its speed."""
    took_s, plain_s = World(lambda now_s: Weather(GOOD, 0.3, num_sessions)).run(60.0)
    always = World(lambda now_s: Weather(GOOD, 0.3, num_sessions), gate=SpeculationGate(is_gating=False))
    took_always_s, plain_always_s = always.run(60.0)
    assert plain_s / took_s > 0.97 * plain_always_s / took_always_s


def test_sessions_are_judged_one_by_one() -> None:
    """Every other prompt suits the draft: these speculate, the others do not, and that beats all and none of them."""
    world = World(
        lambda now_s: Weather(0.0, 0.3, 8), accepts_of=lambda number, _: GOOD if number % 2 else 0.0, length=4000
    )
    world.run(5.0)
    for _ in world.steps(1.0):
        pass
    on = {session.number % 2 for session in world.sessions if session.state and session.state.phase is Phase.ON}
    off = {session.number % 2 for session in world.sessions if session.state and session.state.phase is Phase.OFF}
    assert on == {1}
    assert off >= {0}
    took_s, plain_s = world.run(10.0)
    assert plain_s / took_s > 1.3


def test_sessions_of_one_kind_do_not_pay_for_what_another_loses() -> None:
    """Short requests, one at a time, every other one of a kind for which nothing is ever accepted."""
    for seed in range(4):
        world = World(
            lambda now_s: Weather(GOOD, 0.5),
            accepts_of=lambda number, _: 0.0 if number % 2 else GOOD,
            kind_of=lambda number: "sampled" if number % 2 else "greedy",
            length=60,
            seed=seed,
        )
        world.run(10.0)
        open_steps, steps = 0, 0
        for _ in world.steps(20.0):
            good = [session for session in world.sessions if session.number % 2 == 0]
            open_steps += sum(world.gate.is_open(session.state) for session in good)
            steps += len(good)
        assert open_steps / steps > 0.9, seed


def test_a_streak_of_bad_luck_at_the_beginning_keeps_speculation_away_for_moments_only() -> None:
    """Short requests on a noisy machine: the first steps may empty the account before what they gain is known."""
    ratios = []
    for seed in range(40):
        world = World(lambda now_s: Weather(3.0, 0.7), seed=seed, length=60, noise=0.3, step_s=0.007)
        took_s, plain_s = world.run(6.0)
        ratios.append(plain_s / took_s)
    assert min(ratios) > 1.4
    assert sorted(ratios)[len(ratios) // 2] > 1.8


def test_a_first_text_that_nobody_can_guess_keeps_speculation_away_for_less_than_a_second() -> None:
    """Short requests, one at a time; a probe costs as much as a new kind is lent."""
    shares = []
    for seed in range(30):
        world = World(
            lambda now_s: Weather(3.0, 0.5),
            accepts_of=lambda number, _: 3.0 if number else 0.05,
            seed=seed,
            length=48,
            noise=0.3,
        )
        for _ in world.steps(10.0):
            if world.num_begun > 1:
                break
        world.run(1.0)
        shares.append(world.share_speculating(0.5))
    assert sum(share > 0.7 for share in shares) >= 24


def test_a_gate_that_is_off_suspends_nobody() -> None:
    world = World(ADVERSITIES["one that takes half of the machine"], gate=SpeculationGate(is_gating=False))
    world.run(2.0)
    assert world.share_speculating(1.0) == 1.0


def test_a_single_step_that_stalls_for_long_ends_no_speculation() -> None:
    world = World(lambda now_s: Weather(GOOD, 0.3, 4), length=100_000)
    world.run(5.0)
    states = [session.state for session in world.sessions if session.state is not None]
    world.gate.observe_turn(states, num_tokens=[1] * 4, turn_s=0.3, now_s=world.now_s, waiting=states)
    assert world.share_speculating(2.0) > 0.8


def test_costs_are_what_steps_took_longer_by_the_share_that_speculates() -> None:
    clock = StepClock()
    assert clock.expected_plain_s(8) == clock.rows.predict(8), "not measured: by its rows"
    for _ in range(200):
        clock.observe_turn(8, 0.0, 0.010)
        clock.observe_turn(8, 0.5, 0.012)
        clock.observe_turn(8, 1.0, 0.014)
    assert clock.plain_s(8) == clock.expected_plain_s(8) == pytest.approx(0.010)
    assert clock.min_gain_tokens(8) == pytest.approx(0.4, abs=0.02)
    assert clock.min_gain_tokens(12) == clock.min_gain_tokens(8), "what is not known of a load is the nearest one's"


def test_one_slow_step_of_few_that_speculate_does_not_make_speculation_dear() -> None:
    clock = StepClock()
    for _ in range(5):
        clock.observe_turn(64, 0.0, 0.01)
    clock.observe_turn(64, 1 / 64, 0.0105)
    assert 0 < clock.min_gain_tokens(64) < 0.5


def test_bands_grow_with_the_load() -> None:
    bands = [load_band(number) for number in range(1, 300)]
    assert bands == sorted(bands)
    assert bands[:4] == [1, 2, 3, 4]
    assert len(set(bands)) < 20
