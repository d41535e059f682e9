"""The simulator's policies are the services' own classes: a copy in the simulator would be seen here."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from specdec.coordinator.intake.admission import AdmissionQueue
from specdec.coordinator.intake.fair_queue import FairQueue
from specdec.coordinator.intake.load_shedding import LoadShedding
from specdec.coordinator.replicas.outliers import OutlierDetector
from specdec.coordinator.replicas.router import PrefixRouter
from specdec.coordinator.tenants.quotas import Allowance, QuotaRate, TenantLimits, TokenQuotas
from specdec.drafting.role.growth import GrowthPolicy
from specdec.plan.inputs.traffic import Lengths, Rate
from specdec.plan.simulation.faults import Loss, Scope
from specdec.plan.simulation.pair import Pair, PairSettings, Speculation
from specdec.target_service.pacing.expectations import Expectations
from specdec.target_service.pacing.pacing import Pacing
from specdec.target_service.policy.gate import SpeculationGate
from specdec.target_service.policy.hold_off import DraftLatency, HoldOffChoice
from specdec.target_service.policy.step_time import StepTimeModel
from specdec.target_service.tree.speculation_tree import SpeculationTree
from specdec.wire.backoff import Backoff
from tests.support.plan import Flat, flat_plan, simulated

OF_COORDINATORS = (
    (AdmissionQueue, "acquire"),
    (FairQueue, "push"),
    (LoadShedding, "on_queue"),
    (OutlierDetector, "failed"),
    (PrefixRouter, "pick_link"),
    (TenantLimits, "lease"),
    (TokenQuotas, "admit"),
    (Backoff, "wait_s"),
)
OF_TARGETS_AND_DRAFTS = (
    (Pacing, "choose_trees"),
    (Expectations, "path_scores"),
    (SpeculationGate, "observe_turn"),
    (HoldOffChoice, "choose"),
    (DraftLatency, "until_depth"),
    (StepTimeModel, "observe"),
    (SpeculationTree, "merge"),
    (GrowthPolicy, "grows"),
)


def counted(monkeypatch: pytest.MonkeyPatch, methods: tuple[tuple[type, str], ...]) -> Counter[str]:
    """Calls of the services' methods from now on."""
    calls: Counter[str] = Counter()

    def spied(owner: type, name: str) -> Any:
        own = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[f"{owner.__name__}.{name}"] += 1
            return own(*args, **kwargs)

        return call

    for owner, name in methods:
        monkeypatch.setattr(owner, name, spied(owner, name))
    return calls


def test_a_fleets_requests_are_judged_by_the_coordinators_own_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, OF_COORDINATORS)
    traffic = Rate(per_s=20.0, prompts=Lengths(50), outputs=Lengths(20), tenants=(("limited", 1.0), ("free", 1.0)))
    allowances = {"limited": Allowance(quota=QuotaRate(200.0, 400.0))}
    # Two coordinators share two targets with few sessions, so that targets refuse streams, too.
    plan = flat_plan(0.05, num_targets=2, max_sessions=3, max_running=4, allowances=allowances, target_timeout_s=20.0)
    loss = Loss(scope=Scope.REPLICA, at_s=2.0, down_s=1.0)
    run = simulated(plan, traffic.arrivals(8.0, 1), 8.0, [loss], 60.0)
    assert set(calls) == {f"{owner.__name__}.{name}" for owner, name in OF_COORDINATORS}
    assert calls["AdmissionQueue.acquire"] >= run.tally.num_ended > 0
    assert calls["TokenQuotas.admit"] < calls["TenantLimits.lease"], "only one tenant has a quota"
    assert run.tally.refusals["QUOTA_EXCEEDED"] > 0, "and it asks for more"


def test_a_quota_holds_for_all_coordinators_together_and_its_refusals_are_no_loss() -> None:
    allowances = {"limited": Allowance(quota=QuotaRate(300.0, 300.0))}
    traffic = Rate(per_s=20.0, prompts=Lengths(20), outputs=Lengths(20), tenants=(("limited", 1.0), ("free", 1.0)))
    for num_coordinators in (1, 4):
        plan = flat_plan(num_targets=2, num_coordinators=num_coordinators, allowances=allowances)
        run = simulated(plan, traffic.arrivals(60.0, 1), 60.0, [], 60.0)
        assert 40 * run.tally.num_ended == pytest.approx(60 * 10 * 40 + 60 * 300, rel=0.1)
        assert run.tally.refused_of["limited"] > 50
        assert run.tally.refused_of["free"] == 0
        assert run.tally.served_share == 1.0


def test_a_pairs_steps_are_paced_by_the_targets_and_drafts_own_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, OF_TARGETS_AND_DRAFTS)
    settings = PairSettings(target=Flat(0.02), draft=Flat(0.004), acceptance=[0.7], prompt_tokens=64)
    Pair(settings, Speculation.ADAPTIVE, 2, 60, seed=1).run(0.5, 2.0, 50)
    assert set(calls) == {f"{owner.__name__}.{name}" for owner, name in OF_TARGETS_AND_DRAFTS}


def test_a_policy_that_is_changed_in_the_services_changes_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router's choice decides where streams run."""
    monkeypatch.setattr(PrefixRouter, "pick_link", lambda self, links, *_: links[0])
    plan = flat_plan(num_targets=3, num_coordinators=1, max_sessions=1000, max_running=1000)
    arrivals = Rate(per_s=20.0, prompts=Lengths(10), outputs=Lengths(20)).arrivals(10.0, 1)
    run = simulated(plan, arrivals, 10.0)
    assert run.most_sessions >= 0.9 * run.mean_sessions
    assert run.busy == pytest.approx(1 / 3, abs=0.05)
