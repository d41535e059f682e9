"""Block verification on random distributions: the target's distribution over rounds, and never fewer tokens."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from specdec.engine.errors import NonFiniteLogits
from specdec.engine.sampling import block_verification
from specdec.engine.sampling.block_verification import verify_block
from specdec.engine.sampling.noise import Purpose, uniform
from specdec.engine.sampling.rejection import DraftSample, verify_token
from specdec.wire.sampling_params import SamplingParams
from tests.support.engine.rejection import FALSE_ALARM_RATE, chi_square_p_value
from tests.support.engine.sparse_draw import draw

VOCAB_SIZE = 3
LENGTH = 3
Path = tuple[int, ...]


def params(seed: int) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=9)


@cache
def distribution(name: str, path: Path) -> torch.Tensor:
    """Of a model that looks at all tokens before; [V] float32."""
    generator = torch.Generator().manual_seed(hash((3, sum(map(ord, name)), path)) % 2**63)
    return torch.softmax(torch.randn(VOCAB_SIZE, generator=generator), dim=0)


def drafted(prefix: Path, seed: int, chain: int | None) -> list[DraftSample]:
    """A chain below `prefix`, drawn token by token."""
    path, drafts = prefix, []
    for _ in range(LENGTH):
        probs = tuple(distribution("draft", path).tolist())
        u = uniform(seed, 0, Purpose.DRAFT, len(path), chain)
        drafts.append(DraftSample(draw((0, 1, 2), probs, u), (0, 1, 2), probs))
        path += (drafts[-1].token_id,)
    return drafts


def target_rows(prefix: Path, drafts: list[DraftSample]) -> torch.Tensor:
    tokens = [draft.token_id for draft in drafts]
    return torch.stack([distribution("target", (*prefix, *tokens[:i])) for i in range(len(drafts))])


def plain(path: Path, seed: int) -> int:
    return draw((0, 1, 2), tuple(distribution("target", path).tolist()), uniform(seed, 0, Purpose.PLAIN, len(path)))


def decoded(seed: int, num_tokens: int, is_fresh: bool = True) -> Path:
    """Tokens of as many rounds as it takes."""
    path: Path = ()
    while len(path) < num_tokens:
        drafts = drafted(path, seed, len(path) if is_fresh else None)
        num_accepted, instead = verify_block(target_rows(path, drafts), drafts, params(seed), len(path))
        path += tuple(draft.token_id for draft in drafts[:num_accepted])
        path += (plain(path, seed) if instead is None else instead,)
    return path[:num_tokens]


def exact(num_tokens: int) -> dict[Path, float]:
    return {
        path: math.prod(float(distribution("target", path[:i])[token]) for i, token in enumerate(path))
        for path in product(range(VOCAB_SIZE), repeat=num_tokens)
    }


def test_tokens_of_several_rounds_follow_the_target() -> None:
    counts = Counter(decoded(seed, 4) for seed in range(4000))
    assert chi_square_p_value(counts, exact(4)) > FALSE_ALARM_RATE


def test_numbers_of_a_chain_that_was_given_up_would_bias_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same test fails if a position has one number for the accept tests, and one for the draws, of all chains."""

    def of_position(seed: int, choice: int, purpose: Purpose, t: int, chain: int | None = None) -> float:
        return uniform(seed, choice, purpose, t)

    monkeypatch.setattr(block_verification, "uniform", of_position)
    counts = Counter(decoded(seed, 4, is_fresh=False) for seed in range(4000))
    assert chi_square_p_value(counts, exact(4)) < FALSE_ALARM_RATE


def token_by_token(drafts: list[DraftSample], rows: torch.Tensor, seed: int) -> int:
    for index, (draft, row) in enumerate(zip(drafts, rows, strict=True)):
        if not verify_token(row, draft, params(seed), index)[0]:
            return index
    return len(drafts)


def expected_lengths() -> tuple[float, float]:
    """Accepted tokens per chain in closed form: of a block, and token by token."""
    of_block = of_tokens = 0.0
    for length in range(1, LENGTH + 1):
        for path in product(range(VOCAB_SIZE), repeat=length):
            drawn, weight, kept = 1.0, 1.0, 1.0
            for i, token in enumerate(path):
                p = float(distribution("target", path[:i])[token])
                q = float(distribution("draft", path[:i])[token])
                drawn, weight, kept = drawn * q, min(1.0, weight * p / q), kept * min(1.0, p / q)
            of_block += drawn * weight
            of_tokens += drawn * kept
    return of_block, of_tokens


def test_a_block_accepts_as_many_tokens_as_the_weights_say_and_more_than_token_by_token() -> None:
    num_chains, of_block, of_tokens = 4000, 0, 0
    for seed in range(num_chains):
        drafts = drafted((), seed, 0)
        rows = target_rows((), drafts)
        of_block += verify_block(rows, drafts, params(seed), 0)[0]
        of_tokens += token_by_token(drafts, rows, seed)
    expected_block, expected_tokens = expected_lengths()
    assert expected_block > 1.02 * expected_tokens
    most_error = 5 * LENGTH / 2 / math.sqrt(num_chains)  # five standard errors
    assert of_block / num_chains == pytest.approx(expected_block, abs=most_error)
    assert of_tokens / num_chains == pytest.approx(expected_tokens, abs=most_error)
    assert of_block > of_tokens


def test_a_chain_of_one_is_decided_as_a_token_is() -> None:
    for seed in range(300):
        draft = drafted((), seed, 0)[:1]
        rows = target_rows((), draft)
        num_accepted, _ = verify_block(rows, draft, params(seed), 0)
        u = uniform(seed, 0, Purpose.ACCEPT, 0, 0)
        ratio = float(rows[0, draft[0].token_id]) / draft[0].probs[draft[0].token_id]
        assert num_accepted == (u < ratio)


def test_a_draft_that_is_the_target_is_accepted_whole() -> None:
    for seed in range(200):
        drafts = drafted((), seed, 0)
        rows = torch.stack([torch.tensor(draft.probs) for draft in drafts])
        assert verify_block(rows, drafts, params(seed), 0) == (LENGTH, None)


def test_a_point_mass_is_taken_with_the_targets_probability() -> None:
    certain = [DraftSample(1, (1,), (1.0,)), DraftSample(2, (2,), (1.0,))]
    rows = torch.tensor([[0.3, 0.4, 0.3], [0.25, 0.25, 0.5]])
    accepted = Counter(verify_block(rows, certain, params(seed), 0) for seed in range(8000))
    shares = {1: 0.4 * 0.5, 0: 0.6}
    assert accepted[2, None] / 8000 == pytest.approx(0.2, abs=0.025)
    assert sum(n for (k, _), n in accepted.items() if k == 0) / 8000 == pytest.approx(shares[0], abs=0.03)
    assert accepted[0, 1] == 0
    assert accepted[1, 2] == 0


def test_a_token_that_the_target_never_samples_is_never_accepted() -> None:
    drafts = [DraftSample(0, (0, 1), (0.5, 0.5)), DraftSample(1, (0, 1), (0.5, 0.5))]
    rows = torch.tensor([[0.0, 0.5, 0.5], [0.3, 0.4, 0.3]])
    for seed in range(300):
        num_accepted, instead = verify_block(rows, drafts, params(seed), 0)
        assert num_accepted == 0
        assert instead in (1, 2)


@pytest.mark.parametrize("row", [0, 1])
def test_a_row_that_is_not_a_number_is_an_error(row: int) -> None:
    drafts: list[Any] = drafted((), 1, 0)
    rows = target_rows((), drafts)
    rows[row] = math.nan
    with pytest.raises(NonFiniteLogits):
        verify_block(rows, drafts, params(1), 0)
