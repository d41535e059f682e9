"""Drafts with another tokenizer, and drafts of whole blocks, change no token; and what they draft is of use."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from specdec.config import DraftSettings
from specdec.drafting.role.metrics import DraftRecorder
from specdec.engine.errors import ModelLoadError
from specdec.target_service.proposals.own_draft import build_own_draft
from specdec.telemetry import DraftMetrics
from tests.support.engine.constrained import SCHEMAS, constrained
from tests.support.engine.grammars import json_schema
from tests.support.engine.local_pair import MODELS, LocalPair, open_session, prompts
from tests.support.engine.other_tokenizers import (
    draft_of_another_family,
    draft_of_pieces,
    draft_with_fewer_tokens,
    permuted_draft,
)
from tests.support.engine.outcomes import Outcome
from tests.support.engine.parallel_drafts import draft_with_a_mask
from tests.support.engine.rejection import REJECTION, check_distribution
from tests.unit.lossless.cases import CASES
from tests.unit.lossless.sessions import Plainly, assert_all_equal, assert_equal, body_of, examples

Make = Callable[[Path], LocalPair]


def intersecting(draft: Path, **options: Any) -> LocalPair:
    return LocalPair(draft=str(draft), draft_options={"heterogeneous_vocab": "intersection", **options})


def by_text(draft: Path, **options: Any) -> LocalPair:
    return LocalPair(draft=str(draft), draft_options={"heterogeneous_vocab": "text", **options})


def training_texts() -> list[str]:
    return [(MODELS / name).read_text() for name in ("evaluate.py", "train.py", "README.md")]


PAIRS: dict[str, Make] = {
    "permuted": lambda folder: intersecting(permuted_draft(folder)),
    "fewer tokens": lambda folder: intersecting(draft_with_fewer_tokens(folder, 900)),
    "another family": lambda folder: intersecting(draft_of_another_family(folder, training_texts())),
    "text, permuted": lambda folder: by_text(permuted_draft(folder)),
    "text, fewer tokens": lambda folder: by_text(draft_with_fewer_tokens(folder, 600)),
    "text, another family": lambda folder: by_text(draft_of_another_family(folder, training_texts())),
    "text, pieces": lambda folder: by_text(draft_of_pieces(folder, training_texts())),
    "blocks": lambda folder: LocalPair(draft=str(draft_with_a_mask(folder))),
}


@pytest.fixture(scope="module", params=PAIRS)
def loaded_other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LocalPair:
    return PAIRS[request.param](tmp_path_factory.mktemp("other") / "draft")


@pytest.fixture
def other(loaded_other: LocalPair) -> Iterator[LocalPair]:
    loaded_other.reset()
    yield loaded_other
    loaded_other.reset()


@pytest.fixture(scope="module")
def permuted(tmp_path_factory: pytest.TempPathFactory) -> LocalPair:
    return PAIRS["permuted"](tmp_path_factory.mktemp("permuted") / "draft")


@pytest.mark.parametrize("case", CASES[::5], ids=lambda case: f"temperature={case['temperature']}")
def test_no_token_changes(case: dict[str, Any], other: LocalPair, plainly: Plainly) -> None:
    body = body_of(case)
    expected = plainly(body)
    outcome = other.run({"a": body})["a"]
    assert_equal(outcome, expected)
    assert not outcome.rejected
    assert not outcome.draft_errors


@given(seed=st.integers(0, 2**32), chosen=st.lists(st.integers(0, 99), min_size=2, max_size=6))
@settings(examples, max_examples=4)
def test_late_repeated_and_lost_proposals_change_nothing(
    loaded_other: LocalPair, plainly: Plainly, seed: int, chosen: list[int]
) -> None:
    loaded_other.reset()
    opens = {str(i): body_of(CASES[index % len(CASES)]) for i, index in enumerate(chosen)}
    outcomes = loaded_other.run(opens, rng=random.Random(seed), verify_all=seed % 2 == 0)
    assert_all_equal(outcomes, opens, plainly)


@pytest.mark.parametrize("kind", ["text", "blocks"])
def test_preemption_changes_no_token(kind: str, tmp_path: Path, plainly: Plainly) -> None:
    tight = {"num_blocks": 12, "max_batch_tokens": 20, "max_batch_seqs": 3}
    folder = tmp_path / "draft"
    if kind == "text":
        used = by_text(draft_with_fewer_tokens(folder, 900), **tight)
    else:
        used = LocalPair(draft=str(draft_with_a_mask(folder)), draft_options=tight)
    opens = {str(i): body_of({"prompt": i % 2, "temperature": i % 2, "seed": i}) for i in range(6)}
    outcomes = used.run(opens)
    assert_all_equal(outcomes, opens, plainly)
    assert used.draft_built.engine.stats().preemptions > 0


def test_what_they_draft_is_accepted_at_times(other: LocalPair, plainly: Plainly) -> None:
    opens = {
        str(i): open_session(prompts()[i % 4][:40], temperature=t, max_tokens=64, ignore_eos=True)
        for i, t in enumerate((0.0, 0.0, 0.7, 1.0))
    }
    outcomes = other.run(opens)
    assert_all_equal(outcomes, opens, plainly)
    assert sum(outcome.num_accepted for outcome in outcomes.values()) > 8


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_draft_with_its_ids_in_another_order_is_accepted_as_often(
    temperature: float, permuted: LocalPair, pair: LocalPair
) -> None:
    """Nothing but the order of ids differs: the same is drafted and verified, but for what comes a turn later."""
    bodies = {
        str(i): open_session(prompts()[i][:48], temperature=temperature, max_tokens=64, ignore_eos=True, seed=i)
        for i in range(6)
    }

    def ran(used: LocalPair) -> dict[str, Outcome]:
        used.reset()
        used.drafter._ahead.drawing = None  # how many rounds one call draws depends on the clock
        return used.run(bodies, draft_turns=20, hold_off_ms=60_000.0)

    ours, theirs = ran(permuted), ran(pair)
    assert {name: one.token_ids for name, one in ours.items()} == {name: one.token_ids for name, one in theirs.items()}
    num_ours, num_theirs = (sum(one.num_accepted for one in each.values()) for each in (ours, theirs))
    assert num_ours == pytest.approx(num_theirs, rel=0.05)
    assert num_ours > len(bodies) * 64 / 3


def test_rejection_mode_keeps_the_distribution_over_the_shared_tokens(tmp_path: Path) -> None:
    """The false-alarm rate is 1e-6."""
    used = intersecting(draft_with_fewer_tokens(tmp_path / "draft", 900))
    check_distribution(used, REJECTION, 768, least_share=1 / 8)


def test_rejection_mode_keeps_the_distribution_with_text(tmp_path: Path) -> None:
    """Tokens are point masses. The false-alarm rate is 1e-6."""
    check_distribution(by_text(draft_with_fewer_tokens(tmp_path / "draft", 900)), REJECTION, 768, least_share=1 / 8)


def test_rejection_mode_keeps_the_distribution_with_blocks(tmp_path: Path) -> None:
    """The false-alarm rate is 1e-6."""
    check_distribution(LocalPair(draft=str(draft_with_a_mask(tmp_path / "draft"))), REJECTION, 768, least_share=1 / 16)


def test_a_target_drafts_what_is_shared_itself(tmp_path: Path, plainly: Plainly) -> None:
    used = intersecting(draft_with_fewer_tokens(tmp_path / "draft", 2500))
    used.reset(own_draft=True)
    body = open_session(prompts()[0][:40], temperature=0.7, max_tokens=48, ignore_eos=True)
    outcome = used.run({"a": body})["a"]
    assert outcome.num_accepted > 8
    assert_equal(outcome, plainly(body))


def test_a_target_drafts_no_text_itself(tmp_path: Path, pair: LocalPair) -> None:
    draft = permuted_draft(tmp_path / "draft")
    settings = DraftSettings(model=str(draft), heterogeneous_vocab="text", num_threads=1, num_blocks=8)
    recorder = DraftRecorder(DraftMetrics(CollectorRegistry()))
    with pytest.raises(ModelLoadError, match="text is for a draft service"):
        build_own_draft(pair.target_host, pair.target_built, settings, recorder)


@pytest.mark.parametrize("kind", ["permuted", "text, permuted"])
def test_constraints_hold_with_drafts_of_other_tokenizers(kind: str, tmp_path: Path, plainly: Plainly) -> None:
    used = PAIRS[kind](tmp_path / "draft")
    for name in ("record", "enumeration", "date"):
        body = constrained(json_schema(SCHEMAS[name]), temperature=0.7, seed=3, max_tokens=40)
        outcome = used.run({"a": body})["a"]
        assert_equal(outcome, plainly(body))
        assert not outcome.rejected
        assert not outcome.draft_errors


def test_a_permuted_draft_of_blocks_says_the_same_blocks(tmp_path: Path, loaded_pair: LocalPair) -> None:
    plain = LocalPair(draft=str(draft_with_a_mask(tmp_path / "plain")))
    turned = intersecting(permuted_draft(tmp_path / "turned", base=tmp_path / "plain"))
    body = open_session(prompts()[0][:40], temperature=0.7, max_tokens=48, ignore_eos=True)

    def run(used: LocalPair) -> Outcome:
        return used.run({"a": body}, draft_turns=20, hold_off_ms=60_000.0)["a"]

    ours, theirs = run(turned), run(plain)
    assert turned.draft_built.mask_token_id == 4096
    assert ours.token_ids == theirs.token_ids
    assert (ours.num_accepted, ours.num_verified) == (theirs.num_accepted, theirs.num_verified)
