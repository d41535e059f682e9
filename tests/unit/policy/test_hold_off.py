"""How long a step waits for a draft."""

from __future__ import annotations

import random
from functools import partial

import pytest

from specdec.target_service.policy.budget import SHARE, WaitPurse
from specdec.target_service.policy.hold_off import DEPTHS, DraftLatency, kind_of
from specdec.target_service.policy.hold_off import HoldOffChoice as AnyHoldOffChoice

HoldOffChoice = partial(AnyHoldOffChoice, window=1)


def play(choice: AnyHoldOffChoice, tokens_per_s: dict[int, float], episodes: int, seed: int = 0) -> list[int]:
    """Episodes of a few tokens whose rate depends on the depth waited for, with noise."""
    rng = random.Random(seed)
    chosen = []
    for _ in range(episodes):
        depth = choice.choose(max_depth=8)
        num_tokens = rng.randint(1, 9)
        choice.observe(depth, num_tokens, num_tokens / tokens_per_s[depth] * rng.uniform(0.7, 1.3))
        chosen.append(depth)
    return chosen


def test_every_depth_is_tried_before_one_is_preferred() -> None:
    assert set(play(HoldOffChoice(), dict.fromkeys(DEPTHS, 100.0), len(DEPTHS))) == set(DEPTHS)


@pytest.mark.parametrize("best", DEPTHS)
def test_the_depth_with_the_best_rate_is_chosen_most_of_the_time(best: int) -> None:
    rates = {depth: 150.0 if depth == best else 100.0 for depth in DEPTHS}
    chosen = play(HoldOffChoice(), rates, 400)
    assert chosen[100:].count(best) > 0.8 * 300


def test_a_change_of_the_best_depth_is_noticed() -> None:
    choice = HoldOffChoice()
    play(choice, {0: 100.0, 2: 200.0, 4: 100.0}, 200)
    chosen = play(choice, {0: 200.0, 2: 100.0, 4: 100.0}, 400, seed=1)
    assert chosen[200:].count(0) > 0.8 * 200


def test_a_depth_is_kept_for_a_window_of_episodes() -> None:
    chosen = play(AnyHoldOffChoice(window=5), dict.fromkeys(DEPTHS, 100.0), 60)
    assert all(len(set(chosen[start : start + 5])) == 1 for start in range(0, 60, 5))


def test_a_small_gain_does_not_justify_a_wait() -> None:
    choice, chosen = HoldOffChoice(), []
    for _ in range(200):
        depth = choice.choose(max_depth=8)
        choice.observe(depth, 10, 10 / {0: 100.0, 2: 109.0, 4: 105.0}[depth])
        chosen.append(depth)
    assert chosen.count(0) > 0.8 * 200


def test_other_depths_are_tried_now_and_then() -> None:
    choice = HoldOffChoice()
    chosen = play(choice, {0: 300.0, 2: 100.0, 4: 100.0}, 320)
    assert chosen[40:].count(2) + chosen[40:].count(4) >= 16


def test_a_depth_is_a_trial_once_it_is_known_to_be_worse_than_not_waiting() -> None:
    choice = AnyHoldOffChoice(window=6)
    assert not any(map(choice.is_trial, DEPTHS)), "nothing is known yet"
    play(choice, {0: 200.0, 2: 240.0, 4: 100.0}, 60)
    assert [choice.is_trial(depth) for depth in DEPTHS] == [False, False, True]


def test_waits_that_nothing_speaks_for_take_the_budgets_share_of_the_time() -> None:
    allowance, now_s, waited_s = WaitPurse(0.01), 0.0, 0.0
    for _ in range(20_000):
        now_s += 0.0005
        if allowance.grants(0.004, now_s):
            waited_s += 0.004
            now_s += 0.004
    assert 0.9 * SHARE * now_s < waited_s <= SHARE * now_s + allowance.most_s


def test_a_wait_longer_than_what_is_saved_for_others_comes_when_it_is_paid_for() -> None:
    allowance = WaitPurse(0.01)
    grants_s = [step * 0.01 for step in range(700) if allowance.grants(0.04, step * 0.01)]
    assert len(grants_s) == 2
    assert grants_s[1] - grants_s[0] == pytest.approx(0.04 / SHARE, abs=0.1)


def test_sessions_that_wait_together_pay_for_it_once() -> None:
    allowance = WaitPurse(0.01)
    assert all(allowance.grants(0.008, 1.0) for _ in range(8))
    assert not allowance.grants(0.008, 1.001)
    assert allowance.grants(0.002, 1.002), "what is left"


def test_no_more_depth_is_wanted_than_can_be_verified() -> None:
    choice = HoldOffChoice()
    assert {choice.choose(max_depth=1) for _ in range(40)} == {0}
    assert {choice.choose(max_depth=3) for _ in range(40)} <= {0, 2}


def test_latencies_are_moving_averages() -> None:
    latency = DraftLatency(first_s=0.010, node_s=0.010)
    latency.observe_first(0.030)
    latency.observe_node(0.0)
    assert (latency.first_s, latency.node_s) == (pytest.approx(0.011), pytest.approx(0.0095))
    assert latency.until_depth(1) == latency.until_depth(0) == latency.first_s
    assert latency.until_depth(3) == pytest.approx(0.030)


def test_sessions_of_like_temperature_learn_together() -> None:
    assert kind_of(0.0) == "greedy"
    assert kind_of(0.3) == kind_of(0.7) == "cool"
    assert kind_of(1.0) == kind_of(2.0) == "warm"
