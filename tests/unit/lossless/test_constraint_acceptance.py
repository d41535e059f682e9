"""What it brings that the draft masks its guesses, and that forced tokens are proposed; `-s` shows the figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from specdec.v1 import common_pb2 as pb
from tests.support.engine.constrained import SCHEMAS, constrained
from tests.support.engine.grammars import json_schema
from tests.support.engine.local_pair import LocalPair


@dataclass
class Figures:
    """Of all schemas together."""

    num_tokens: int
    num_steps: int
    num_proposed: int
    num_accepted: int
    num_forced: int

    def __str__(self) -> str:
        return (
            f"{self.num_tokens / self.num_steps:.2f} tokens a step, {self.num_accepted / self.num_proposed:.1%} of "
            f"{self.num_proposed} proposed tokens accepted, {self.num_forced} of {self.num_tokens} tokens forced"
        )


@pytest.fixture
def unmasked(pair: LocalPair) -> Iterator[LocalPair]:
    """The pair with a draft that knows no constraints, as one of the last release does not."""
    built = pair.draft_built
    pair.draft_built = replace(built, grammars=None)
    pair.reset()
    yield pair
    pair.draft_built = built
    pair.reset()


def measured(pair: LocalPair, temperature: float, names: Sequence[str]) -> Figures:
    bodies = {
        f"{name} {seed}": constrained(json_schema(SCHEMAS[name]), temperature=temperature, seed=seed, max_tokens=60)
        for name in names
        for seed in range(1 if temperature == 0 else 2)
    }
    outcomes = [outcome for body in bodies.values() for outcome in pair.run({"a": body}).values()]
    assert all(outcome.error is None and not outcome.draft_errors for outcome in outcomes)
    return Figures(
        sum(len(outcome.token_ids) for outcome in outcomes),
        sum(len(outcome.verdicts) for outcome in outcomes),
        sum(outcome.num_verified for outcome in outcomes),
        sum(outcome.num_accepted for outcome in outcomes),
        sum(outcome.origins.count(pb.ORIGIN_FORCED) for outcome in outcomes),
    )


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("record", "constant", "nullable"), id="some"),
        pytest.param(tuple(SCHEMAS), id="all", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_masks_saves_steps(
    temperature: float, names: Sequence[str], pair: LocalPair, unmasked: LocalPair
) -> None:
    without = measured(unmasked, temperature, names)
    pair.draft_built = replace(pair.draft_built, grammars=pair.target_built.grammars)
    pair.reset()
    masked = measured(pair, temperature, names)
    print(f"\ntemperature {temperature:g}\n  masked: {masked}\n  unmasked: {without}")  # noqa: T201
    assert masked.num_tokens == without.num_tokens
    assert masked.num_steps < without.num_steps
