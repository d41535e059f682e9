"""A sweep varies one thing, by settings that services take."""

from __future__ import annotations

import pytest

from bench.pairs import resolve_pair
from bench.plan import BenchPlan
from bench.sweep import DRAFT_WEIGHTS, SWEEPS
from specdec.config import DraftSettings


@pytest.fixture
def plan() -> BenchPlan:
    return BenchPlan(
        pair=resolve_pair("shipped", "cpu"), cores=(0, 1), device="cpu", placement="together", num_prompts=2,
        max_tokens=32, repeats=1, batches=(1,), temperatures=(0.0,), verify_mode="coupled", systems=(),
        sync_tokens=(4,), sync_hold_off_ms=10.0, peer_tokens=(3,), rates=(), seconds=1, bursts=(8,),
        first_token_slo_ms=500.0, per_token_slo_ms=50.0,
    )  # fmt: skip


@pytest.mark.parametrize("name", SWEEPS)
def test_each_value_has_a_label_of_its_own_and_settings_that_a_draft_takes(name: str, plan: BenchPlan) -> None:
    steps = SWEEPS[name](plan).steps
    assert len({step.label for step in steps}) == len(steps) > 0
    assert len({(str(step.deployment), str(step.case), step.delay_ms) for step in steps}) == len(steps)
    for step in steps:
        DraftSettings.model_validate({"model": str(plan.pair.draft.folder), **step.deployment.draft})


def test_the_weights_of_a_draft_are_rounded_as_told(plan: BenchPlan) -> None:
    steps = SWEEPS["draft-weights"](plan).steps
    assert [step.deployment.draft["weight_quantization"] for step in steps] == list(DRAFT_WEIGHTS)
