"""The probe of `specdec tune` over real models: a draft with another tokenizer, by the tokens that both have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest

from specdec.commands.tune.probe import measure
from specdec.commands.up.plan import shipped_model
from specdec.drafting.translation.shared import shared_of_files
from specdec.engine.engine import Engine
from specdec.engine.errors import EngineError
from specdec.engine.outputs import StepOutput
from tests.support.engine.other_tokenizers import draft_with_fewer_tokens, permuted_draft

TIMES = {"sequences": [1], "rows": [1], "candidates": 1, "temperature": 0.0}


def task(model: str, **asked: Any) -> dict[str, Any]:
    settings = {"model": model, "device": "cpu", "num_threads": 1, "self_test": False}
    return {**TIMES, "settings": settings, **asked}


def test_no_token_of_a_measured_prompt_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, step = Counter[int](), Engine.step

    def counting(engine: Engine, only: Container[int] | None = None) -> StepOutput | None:
        out = step(engine, only)
        if out is not None:
            computed[sum(item.num_new_tokens for item in out.items)] += 1
        return out

    monkeypatch.setattr(Engine, "step", counting)
    measure(task(shipped_model("draft"), prompt_rows=[16, 48, 160]))
    assert [computed[num] for num in (16, 48, 160)] == [3, 3, 3]


@pytest.fixture(scope="module")
def outputs() -> list[dict[str, Any]]:
    """What the shipped target says to a prompt, greedily and at temperature 1."""
    prompts = ["def fibonacci(n):\n    if n < 2:\n        return n\n"]
    asked = task(shipped_model("target"), prompts=prompts, temperatures=[0.0, 1.0], max_tokens=32)
    found: list[dict[str, Any]] = measure(asked)["outputs"]
    return found


def agreement(draft: str, outputs: list[dict[str, Any]], *, is_translated: bool) -> list[dict[str, Any]]:
    target = shipped_model("target") if is_translated else None
    found: list[dict[str, Any]] = measure(task(draft, outputs=outputs, target_model=target))["agreement"]
    return found


def test_a_draft_with_the_same_tokens_in_another_order_agrees_just_as_often(
    outputs: list[dict[str, Any]], tmp_path: Path
) -> None:
    usual = agreement(shipped_model("draft"), outputs, is_translated=False)
    permuted = agreement(str(permuted_draft(tmp_path / "draft")), outputs, is_translated=True)
    assert [one["ranks"] for one in permuted] == [one["ranks"] for one in usual]
    for one, other in zip(permuted, usual, strict=True):
        assert one["overlaps"] == pytest.approx(other["overlaps"], abs=1e-5)
    assert sum(rank == 0 for one in usual for rank in one["ranks"]) > 20


def test_tokens_that_the_draft_lacks_are_never_right(outputs: list[dict[str, Any]], tmp_path: Path) -> None:
    draft = str(draft_with_fewer_tokens(tmp_path / "draft", 2500))
    vocabulary = shared_of_files(shipped_model("target"), draft)
    found = agreement(draft, outputs, is_translated=True)
    for output, one in zip(outputs, found, strict=True):
        lacks = [vocabulary.columns[token] < 0 for token in output["tokens"]]
        assert all(rank == -1 for rank, is_lacking in zip(one["ranks"], lacks, strict=True) if is_lacking)
    assert any(rank == 0 for one in found for rank in one["ranks"])


def test_a_draft_that_would_draft_text_is_not_measured_as_if_it_drafted_tokens(
    outputs: list[dict[str, Any]], tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match="it would draft text"):
        agreement(str(draft_with_fewer_tokens(tmp_path / "draft", 700)), outputs, is_translated=True)


def test_files_say_of_tokens_what_the_loaded_models_say(tmp_path: Path) -> None:
    vocabulary = shared_of_files(shipped_model("target"), str(draft_with_fewer_tokens(tmp_path / "draft", 2500)))
    assert (vocabulary.num_target, vocabulary.num_named) == (4096, 4096)
    assert vocabulary.num_shared == 2500
    assert 0 in vocabulary.columns and len(vocabulary.joint_ids) == 2500


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ([5, 10**8], "prompt 2 has no token, or a token id outside the model's vocabulary"),
        ([5] * 4000, "prompt 2 has 4000 tokens, which leave no room for 32 more in a context of 2048"),
    ],
    ids=["unknown token", "too long"],
)
def test_a_prompt_that_cannot_be_served_is_named(prompt: list[int], why: str) -> None:
    asked = task(shipped_model("target"), prompts=["def f():", prompt], temperatures=[0.0], max_tokens=32)
    with pytest.raises(EngineError, match=why):
        measure(asked)
