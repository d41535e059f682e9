"""Every decoder class that transformers registers is served exactly, or refused with a reason that is known here.

A class that a newer transformers adds or removes fails these tests. It then belongs on docs/models.md (`make
models-doc`), and into `tests.support.zoo.refused` if it cannot be served.
"""

from __future__ import annotations

import pytest

from tests.support.zoo.cases import Case, cases
from tests.support.zoo.page import PAGE, outcomes, render
from tests.support.zoo.play import TOLERANCE, Played
from tests.support.zoo.refused import REASONS, reason_of

Outcomes = dict[Case, Played | Exception]


@pytest.fixture(scope="module")
def found() -> Outcomes:
    return outcomes(cases())


def unexpected(found: Outcomes) -> dict[str, str]:
    """Classes whose outcome is not the one expected, and why."""
    faults = {}
    for case, outcome in found.items():
        reason = reason_of(case)
        if isinstance(outcome, Played):
            if reason is not None:
                faults[str(case)] = f"is served, but listed as refused: {reason.text}"
            elif not outcome.difference <= TOLERANCE:
                faults[str(case)] = f"differs from transformers by {outcome.difference:.2g} of its logits' spread"
        elif reason is None or not reason.explains(outcome):
            faults[str(case)] = f"is refused: {outcome}"
    return faults


def test_each_class_is_exact_or_refused_for_its_reason(found: Outcomes) -> None:
    assert unexpected(found) == {}


def test_each_play_compares_many_rows_and_hits_the_prefix_cache(found: Outcomes) -> None:
    played = [outcome for outcome in found.values() if isinstance(outcome, Played)]
    assert min(outcome.num_rows for outcome in played) >= 20
    assert {outcome.num_shared_tokens for outcome in played if outcome.context > 41} == {16, 32}


def test_the_list_of_refused_classes_names_only_classes_that_there_are(found: Outcomes) -> None:
    known = {name for case in found for name in (case.class_name, case.model_type)}
    assert {name for reason in REASONS for name in reason.names.split()} - known == set()


def test_the_page_of_models_is_up_to_date(found: Outcomes) -> None:
    assert PAGE.read_text() == render(found), "docs/models.md is out of date; write it again with: make models-doc"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("settings", [{"fused": "off"}, {"native": "off"}, {"num_threads": 2}], ids=str)
def test_each_class_is_exact_over_more_prompts_and_on_other_paths(settings: dict[str, object]) -> None:
    assert unexpected(outcomes(cases(), num_seeds=6, **settings)) == {}


def test_a_class_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: the model in the engine has other weights than the one it is compared with."""
    from tests.support.zoo import play as module

    whole = module.save_model

    def other(case: Case, folder: object) -> object:
        model = whole(case, folder)  # type: ignore[arg-type]
        next(model.parameters()).mul_(1.01)
        return model

    monkeypatch.setattr(module, "save_model", other)
    case = Case("llama", "LlamaForCausalLM")
    assert "differs from transformers" in unexpected(outcomes([case]))[str(case)]
