"""A plan holds its objectives by the figures that it shows: undisturbed, with each loss, and while it is updated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specdec.plan.deployment import Question, placements
from specdec.plan.estimate import estimated, prompt_s
from specdec.plan.found import Found
from specdec.plan.inputs.devices import PlanImpossible, devices_of
from specdec.plan.inputs.models import model_of
from specdec.plan.inputs.traffic import Lengths, Rate
from specdec.plan.search import fewest, search
from specdec.plan.simulation.faults import Loss, Scope
from specdec.plan.simulation.pair import Speculation
from specdec.plan.simulation.tally import Interval
from specdec.plan.trial import Objectives, State, Trials
from tests.support.plan import flat_plan, simulated

TARGET = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 16_384,
    "vocab_size": 32_000,
}
DRAFT = TARGET | {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 4096}
TRIALS = Trials(Rate(per_s=40.0, prompts=Lengths(200), outputs=Lengths(20)), Objectives(1.0, 0.5), 1, [])
LOSSES = [Scope.REPLICA, Scope.NODE, Scope.ZONE]


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the requests: figures are rougher, and what must hold of them is the same."""
    monkeypatch.setattr("specdec.plan.trial._REQUESTS", 150)
    monkeypatch.setattr("specdec.plan.trial._ROUGH_REQUESTS", 75)


def asked_of(devices: str, draft: bool) -> Question:
    return Question(
        target=model_of(TARGET, "7B"),
        draft=model_of(DRAFT, "small") if draft else None,
        devices=devices_of(devices),
        draft_devices=devices_of("L4"),
        acceptance=[0.8],
        context=220,
        prompt_tokens=200,
        request_tokens=220,
    )


def asked(
    rate: float,
    *,
    devices: str = "L4",
    losses: int = 1,
    zones: int = 1,
    ttft_s: float = 1.0,
    itl_s: float = 0.15,
    prompts: Lengths = Lengths(200),  # noqa: B008
    outputs: Lengths = Lengths(20),  # noqa: B008
    draft: bool = False,
    seeds: int = 3,
    burstiness: float = 1.0,
) -> tuple[Found, Objectives]:
    """A plan and its objectives; `losses`: how many of replica, node, zone may be gone."""
    objectives = Objectives(ttft_s, itl_s)
    traffic = Rate(per_s=rate, prompts=prompts, outputs=outputs, burstiness=burstiness)
    trials = Trials(traffic, objectives, zones, LOSSES[:losses])
    return search(asked_of(devices, draft), trials, Speculation.ADAPTIVE, range(1, seeds + 1)), objectives


def check(found: Found, objectives: Objectives) -> None:
    """All figures that a plan shows hold, by the worse ends of their intervals; or it says which do not."""
    shown = [found.figures, *found.with_loss.values()]
    if found.with_loss:
        assert found.rolled is not None and found.update is None and found.warnings == []
        shown.append(found.rolled)
    for figures in shown:
        assert figures.first_token_p99.high <= objectives.first_token_s
        assert figures.inter_token_p99.high <= objectives.inter_token_s
        assert figures.served.low >= 0.995


QUICK: list[dict[str, Any]] = [
    {"rate": 6.0, "losses": 2, "burstiness": 0.2},
    {"rate": 9.0, "losses": 3, "zones": 3, "devices": "A100,L4"},
]
QUESTIONS: list[dict[str, Any]] = [
    {"rate": 3.0},
    {"rate": 0.01},
    {"rate": 12.0, "losses": 2},
    {"rate": 12.0, "losses": 3, "zones": 2},
    {"rate": 12.0, "losses": 0},
    {"rate": 60.0, "losses": 1},
    {"rate": 6.0, "prompts": Lengths(300, 1.0), "ttft_s": 2.0},
    {"rate": 6.0, "outputs": Lengths(20, 1.5), "itl_s": 0.12},
    {"rate": 6.0, "ttft_s": 0.3},
    {"rate": 4.0, "draft": True, "itl_s": 0.1},
    {"rate": 6.0, "seeds": 1},
    {"rate": 6.0, "seeds": 2, "losses": 3, "zones": 4},
]


@pytest.mark.parametrize(
    "question", [*QUICK, *(pytest.param(each, marks=pytest.mark.long) for each in QUESTIONS)], ids=str
)
def test_every_figure_of_a_plan_holds_the_objectives(question: dict[str, Any]) -> None:
    check(*asked(**question))


def test_a_rough_trial_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials with few requests and one seed said yes to plans whose own figures missed the objectives."""
    honest, _ = asked(12.0, itl_s=0.12)
    monkeypatch.setattr(Trials, "holds", lambda *args: True)
    found, objectives = asked(12.0, itl_s=0.12)
    check(found, objectives)
    assert found.deployment.num_targets == honest.deployment.num_targets > 2
    assert found.fewer.startswith(f"{honest.deployment.num_targets - 1} targets, ")


def test_a_rough_trial_that_is_too_strict_does_not_make_a_plan_dearer(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, _ = asked(12.0, itl_s=0.12)
    monkeypatch.setattr(Trials, "holds", lambda self, kind, num, seed: num >= 6)
    assert asked(12.0, itl_s=0.12)[0].deployment.num_targets == honest.deployment.num_targets < 6


def test_the_next_kind_is_taken_when_more_of_the_first_one_cost_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """By rough trials the slow GPU is enough, at a price at which its true number costs more than the fast one's."""
    monkeypatch.setattr(Trials, "holds", lambda *args: True)
    found, objectives = asked(12.0, devices="L4=1,A100=1.3")
    check(found, objectives)
    assert found.deployment.placement.device.name == "A100"
    slow = next(each for each in found.tried if each.label == "L4, no draft")
    assert slow.why_not == "costs more" and slow.price > found.deployment.placement.price_of(2, may_lose=True)


@pytest.mark.parametrize(("acceptance", "wanted"), [(0.8, "L4, draft in the target"), (0.0, "L4, no draft")])
def test_of_equally_dear_kinds_the_fastest_is_taken(
    acceptance: float, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft in the target costs nothing: it is taken where it makes streams faster, and only there."""
    monkeypatch.setattr("specdec.plan.deployment._MOST_RANKS", 1)
    monkeypatch.setattr("specdec.plan.deployment._SHARES", ())
    question = asked_of("L4", True)
    monkeypatch.setattr(f"{__name__}.asked_of", lambda *args: replace(question, acceptance=[acceptance]))
    found, objectives = asked(1.0, draft=True)
    check(found, objectives)
    assert found.deployment.placement.label == wanted


def test_objectives_that_no_number_holds_end_in_one_line() -> None:
    """Alone on a target a long prompt takes 1 % less than it may: what comes beside it takes more."""
    prompts = Lengths(400, 0.5)
    fastest = placements(asked_of("L4", False))[-1]
    kind = estimated(asked_of("L4", False), TRIALS, fastest, Speculation.OFF).kind
    most = Rate(per_s=1.0, prompts=prompts, outputs=Lengths(20)).prompt_quantile(0.99)
    with pytest.raises(PlanImpossible, match=r"for this traffic .*possible are at best") as caught:
        asked(2.0, prompts=prompts, ttft_s=1.01 * prompt_s(kind, most), losses=0, seeds=1)
    assert "\n" not in str(caught.value)


def test_an_update_of_the_only_target_is_told_with_what_would_hold() -> None:
    found, _ = asked(1.0, losses=0)
    assert found.deployment.num_targets == 1 and found.rolled is None and found.update is not None
    assert found.update.num_targets == 2
    (warning,) = found.warnings
    assert "the only target is gone" in warning and "surge" in warning
    assert "1 free L4" in warning and "deploy 2 targets for 0.80 dollars per hour more" in warning


def test_an_update_that_misses_is_told_with_its_figure() -> None:
    found, objectives = asked(12.0, losses=0)
    assert found.rolled is not None and found.update is not None
    assert objectives.missed_by(found.rolled) == found.update.missed != ""
    assert found.update.missed in found.warnings[0]
    assert found.update.num_targets is not None and found.update.num_targets > found.deployment.num_targets


def test_the_worse_end_of_an_interval_counts() -> None:
    objectives = Objectives(1.0, 0.1)
    good, _ = asked(0.5, losses=0, seeds=1)
    figures = good.figures
    object.__setattr__(figures, "first_token_p99", Interval(0.9, 0.2))
    assert objectives.missed_by(figures) == "TTFT p99 900 ± 200 ms"
    assert objectives.crossed_by(figures)
    object.__setattr__(figures, "first_token_p99", Interval(0.7, 0.2))
    assert not objectives.missed_by(figures) and not objectives.crossed_by(figures)
    object.__setattr__(figures, "served", Interval(0.996, 0.002))
    assert objectives.missed_by(figures) == "99.6% served" and objectives.crossed_by(figures)


@pytest.mark.parametrize("wanted", [1, 2, 7, 12, 13, 60, 64])
@pytest.mark.parametrize("start", [1, 5, 12, 30])
def test_the_fewest_that_hold_are_found_from_anywhere(wanted: int, start: int) -> None:
    found = fewest(lambda num: num >= wanted, start, 64, 1)
    assert found is not None and wanted <= found <= wanted * 1.02
    assert fewest(lambda num: False, start, 64, 1) is None


def test_a_loss_is_measured_from_when_it_is_noticed() -> None:
    """Until then its streams stand still, for as long with many targets as with few: no number of them helps."""
    arrivals = Rate(per_s=20.0, prompts=Lengths(10), outputs=Lengths(200)).arrivals(60.0, 1)
    plan = flat_plan(num_targets=4, num_zones=2, max_running=500)
    loss = Loss(scope=Scope.ZONE, at_s=20.0, down_s=1000.0)
    whole, later = (
        simulated(plan, arrivals, 60.0, [loss], 0.0, from_s).tally.first_token for from_s in (0.0, loss.noticed_s)
    )
    assert loss.noticed_s == 25.0
    assert whole.quantile(0.99) > 2.0 > 0.5 > later.quantile(0.99)
    assert 0 < len(later) < 0.7 * len(whole)


def test_requests_that_still_wait_when_a_run_ends_count_as_late() -> None:
    """A fleet that serves half of the load would else be judged by those it served."""
    question = asked_of("L4", False)
    option = estimated(question, TRIALS, placements(question)[0], Speculation.OFF)
    run, _ = TRIALS.run(option.kind, 1, 1, State.UNDISTURBED, is_rough=True)
    late = run.tally.num_arrived - run.tally.num_ended
    assert late > 0.2 * run.tally.num_arrived
    assert run.tally.first_token.share_above(1.0) > 0.2


def test_targets_are_spread_over_nodes_as_the_chart_does_it() -> None:
    """Two replicas that fit on one node are on two: the loss of a node leaves one."""
    found, objectives = asked(1.0, devices="A100", losses=2)
    assert found.deployment.placement.per_node == 8 and found.deployment.num_targets == 2
    check(found, objectives)
