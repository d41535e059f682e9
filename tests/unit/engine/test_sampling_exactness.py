"""Samples follow the distribution they are said to follow, at the false-alarm rate of chi_square.py."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from specdec.engine.sampling import rejection
from specdec.engine.sampling.noise import Purpose, uniform
from specdec.engine.sampling.rejection import DraftSample, verify_token
from specdec.engine.sampling.sampler import RowContext, Sampler
from specdec.wire.sampling_params import SamplingParams
from tests.support.engine.chi_square import FALSE_ALARM_RATE, p_value_of_fit

BATCH = 2048


# Deriving what samplers read of a request takes longer than drawing a token.
@functools.lru_cache(maxsize=8192)
def params_of(seed: int, choice: int, **changed: Any) -> SamplingParams:
    return SamplingParams(seed=seed, choice=choice, max_tokens=9, **changed)


def row(t: int, seed: int = 5, choice: int = 0, **changed: Any) -> RowContext:
    return RowContext(params_of(seed, choice, **changed), position=t, num_prompt_tokens=0)


def draw_all(sampler: Sampler, logits: torch.Tensor, rows: list[RowContext], batch: int = BATCH) -> np.ndarray:
    """Sample every row from the same logits [V]."""
    tokens: list[int] = []
    for begin in range(0, len(rows), batch):
        part = rows[begin : begin + batch]
        tokens += sampler.sample(logits.expand(len(part), -1), part)
    return np.array(tokens)


def softmax(logits: torch.Tensor, temperature: float = 1.0) -> np.ndarray:
    return (logits.double() / temperature).softmax(0).numpy()


def only(probs: np.ndarray, kept: np.ndarray) -> np.ndarray:
    return np.where(kept, probs, 0.0)


def random_logits(vocab_size: int, seed: int = 0, scale: float = 1.5) -> torch.Tensor:
    return scale * torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed))


# ---- coupled sampling --------------------------------------------------------------------------------------------

ACROSS: dict[str, Callable[[int], dict[str, int]]] = {
    "positions": lambda i: {"t": i},
    "seeds": lambda i: {"t": 3, "seed": i},
    "choices": lambda i: {"t": 3, "choice": i},
}


@pytest.mark.parametrize("across", ACROSS)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_samples_follow_the_softmax_across(across: str, temperature: float) -> None:
    logits = random_logits(40)
    rows = [row(**ACROSS[across](i), temperature=temperature) for i in range(30_000)]
    tokens = draw_all(Sampler(40, "cpu"), logits, rows)
    counts = np.bincount(tokens, minlength=40)
    assert p_value_of_fit(counts, softmax(logits, temperature)) > FALSE_ALARM_RATE


def test_samples_without_native_kernels_follow_the_softmax() -> None:
    # With them the tokens are the same to the bit: tests/unit/engine/test_sampling.py.
    logits = random_logits(40)
    tokens = draw_all(Sampler(40, "cpu", native="off"), logits, [row(t, top_p=0.9) for t in range(8_000)])
    assert p_value_of_fit(np.bincount(tokens, minlength=40), expected_after_cuts(logits, top_p=0.9)) > FALSE_ALARM_RATE


def expected_after_cuts(logits: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    probs = softmax(logits)
    order = np.argsort(-probs, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    if top_k:
        probs = only(probs, rank < top_k)
        probs = probs / probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    probs = only(probs, (before < top_p)[rank])
    return only(probs, probs >= min_p * probs.max())


@pytest.mark.parametrize(
    "cuts",
    [{"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9, "min_p": 0.05}],
    ids=str,
)
def test_samples_follow_the_distribution_after_cuts(cuts: dict[str, Any]) -> None:
    logits = random_logits(40)
    rows = [row(t, **cuts) for t in range(30_000)]
    tokens = draw_all(Sampler(40, "cpu"), logits, rows)
    expected = expected_after_cuts(logits, **cuts)
    assert p_value_of_fit(np.bincount(tokens, minlength=40), expected) > FALSE_ALARM_RATE


@pytest.mark.parametrize(("vocab_size", "num_draws"), [(4096, 60_000), (150_000, 6_000)])
@pytest.mark.parametrize("scale", [0.0, 3.0])
def test_samples_follow_the_softmax_of_a_large_vocabulary(vocab_size: int, num_draws: int, scale: float) -> None:
    # Tokens pooled by their id modulo 50, and the likeliest by themselves.
    logits = random_logits(vocab_size, scale=scale)
    probs = softmax(logits)
    cell_of = np.arange(vocab_size) % 50
    cell_of[np.argsort(-probs)[:20]] = 50 + np.arange(20)
    tokens = draw_all(Sampler(vocab_size, "cpu"), logits, [row(t) for t in range(num_draws)], batch=64)
    counts = np.bincount(cell_of[tokens], minlength=70)
    assert p_value_of_fit(counts, np.bincount(cell_of, weights=probs, minlength=70)) > FALSE_ALARM_RATE


def test_the_fit_test_sees_a_temperature_that_is_five_percent_off() -> None:
    logits = random_logits(40)
    tokens = draw_all(Sampler(40, "cpu"), logits, [row(t, temperature=1.05) for t in range(30_000)])
    assert p_value_of_fit(np.bincount(tokens, minlength=40), softmax(logits)) < FALSE_ALARM_RATE


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda i: row(2 * i), lambda i: row(2 * i + 1)),
        (lambda i: row(i), lambda i: row(i, choice=1)),
        (lambda i: row(i), lambda i: row(i, seed=6)),
        (lambda i: row(3, seed=i), lambda i: row(4, seed=i)),
    ],
    ids=["positions", "choices", "seeds", "positions across seeds"],
)
def test_two_samples_are_independent_across(
    first: Callable[[int], RowContext], second: Callable[[int], RowContext]
) -> None:
    logits, sampler = random_logits(12), Sampler(12, "cpu")
    a, b = (draw_all(sampler, logits, [of(i) for i in range(30_000)]) for of in (first, second))
    joint = np.bincount(a * 12 + b, minlength=144)
    assert p_value_of_fit(joint, np.outer(softmax(logits), softmax(logits))) > FALSE_ALARM_RATE


def test_a_draft_in_rejection_mode_is_independent_of_the_plain_draw_of_its_position() -> None:
    logits, sampler = random_logits(12), Sampler(12, "cpu")
    rows = [row(t) for t in range(20_000)]
    a = draw_all(sampler, logits, rows)
    b = np.array([draft.token_id for draft in sampler.draft_sample(logits.expand(len(rows), -1), rows)])
    joint = np.bincount(a * 12 + b, minlength=144)
    assert p_value_of_fit(joint, np.outer(softmax(logits), softmax(logits))) > FALSE_ALARM_RATE


def test_coupled_draft_and_target_agree_at_least_as_often_as_the_bound_says() -> None:
    # Daliri, Musco, Suresh, arXiv:2408.07978: at least (1 - TV) / (1 + TV).
    target, draft = random_logits(40, seed=1), random_logits(40, seed=1) + random_logits(40, seed=2, scale=0.7)
    distance = 0.5 * np.abs(softmax(target) - softmax(draft)).sum()
    rows = [row(t) for t in range(20_000)]
    sampler = Sampler(40, "cpu")
    num_agreed = int((draw_all(sampler, target, rows) == draw_all(sampler, draft, rows)).sum())
    bound = (1 - distance) / (1 + distance)
    assert stats.binomtest(num_agreed, len(rows), bound, alternative="less").pvalue > FALSE_ALARM_RATE
    assert num_agreed / len(rows) < 1 - distance + 0.02  # no coupling can do better than 1 - TV


# ---- rejection verification: the joint distribution of the first three tokens ---------------------------------------

VOCAB_SIZE = 5
LENGTH = 3
START = 0  # the token before the first


@dataclasses.dataclass
class Pair:
    """Bigram models: logits [previous token, next token]."""

    target: torch.Tensor
    draft: torch.Tensor
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    m: int = 64
    drop_below: float = 0.0
    """Wrong on purpose: a drafted token whose own q is below this is not verified."""
    flatten: float = 0.0
    """Wrong on purpose: share of a flat distribution in the q that is sent, but not in the one drawn from."""

    def row(self, seed: int, t: int) -> RowContext:
        return row(t, seed=seed, **self.params)

    def target_probs(self) -> torch.Tensor:
        return Sampler(VOCAB_SIZE, "cpu").probs(self.target, [self.row(0, 0)] * VOCAB_SIZE)

    def joint(self) -> np.ndarray:
        step = self.target_probs().double().numpy()
        step = step / step.sum(1, keepdims=True)
        return np.einsum("a,ab,bc->abc", step[START], step, step)


@dataclasses.dataclass
class Outcome:
    tokens: np.ndarray
    """[number of sequences, LENGTH]"""
    num_verified: int
    num_accepted: int

    def counts(self) -> np.ndarray:
        cells = self.tokens @ np.array([VOCAB_SIZE**2, VOCAB_SIZE, 1])
        return np.bincount(cells, minlength=VOCAB_SIZE**LENGTH)


def drafts_of(pair: Pair, sampler: Sampler, sequences: dict[int, list[int]]) -> dict[int, list[DraftSample]]:
    """Draft a chain for every sequence, up to LENGTH tokens, token by token for all of them together."""
    chains: dict[int, list[DraftSample]] = {seed: [] for seed in sequences}
    for _ in range(LENGTH):
        open_seeds = [seed for seed in sequences if len(sequences[seed]) + len(chains[seed]) < LENGTH]
        if not open_seeds:
            break
        last = [chains[seed][-1].token_id if chains[seed] else [START, *sequences[seed]][-1] for seed in open_seeds]
        rows = [pair.row(seed, len(sequences[seed]) + len(chains[seed])) for seed in open_seeds]
        for seed, draft in zip(open_seeds, sampler.draft_sample(pair.draft[last], rows, pair.m), strict=True):
            chains[seed].append(draft)
    return chains


def sent(pair: Pair, chain: list[DraftSample]) -> Iterator[DraftSample]:
    for draft in chain:
        if draft.probs[draft.ids.index(draft.token_id)] < pair.drop_below:
            return
        flat = sum(draft.probs) / len(draft.probs)
        probs = tuple((1 - pair.flatten) * prob + pair.flatten * flat for prob in draft.probs)
        yield dataclasses.replace(draft, probs=probs) if pair.flatten else draft


def generate(pair: Pair, num_sequences: int) -> Outcome:
    """Generate LENGTH tokens of many seeds in synchronous rounds of drafting and verifying."""
    sampler, target_probs = Sampler(VOCAB_SIZE, "cpu"), pair.target_probs()
    sequences: dict[int, list[int]] = {seed: [] for seed in range(num_sequences)}
    num_verified = num_accepted = 0
    while unfinished := {seed: tokens for seed, tokens in sequences.items() if len(tokens) < LENGTH}:
        plain: list[int] = []
        for seed, chain in drafts_of(pair, sampler, unfinished).items():
            tokens, accepted = sequences[seed], True
            for draft in sent(pair, chain):
                probs = target_probs[[START, *tokens][-1]]
                accepted, token_id = verify_token(probs, draft, pair.row(seed, 0).params, len(tokens))
                tokens.append(token_id)
                num_verified += 1
                num_accepted += accepted
                if not accepted:
                    break
            if accepted and len(tokens) < LENGTH:
                plain.append(seed)
        if plain:
            last = [[START, *sequences[seed]][-1] for seed in plain]
            rows = [pair.row(seed, len(sequences[seed])) for seed in plain]
            for seed, token_id in zip(plain, sampler.sample(pair.target[last], rows), strict=True):
                sequences[seed].append(token_id)
    return Outcome(np.array(list(sequences.values())), num_verified, num_accepted)


def models(seed: int, scale: float = 1.2) -> torch.Tensor:
    return scale * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def impossible_tokens() -> torch.Tensor:
    logits = models(1)
    logits[:, [1, 4]] = -math.inf
    return logits


PAIRS = {
    "a draft that disagrees strongly": Pair(models(1), -2.0 * models(1)),
    "a draft that agrees somewhat": Pair(models(1), models(1) + models(2, 0.5)),
    "a draft cut to two tokens": Pair(models(1), models(2), m=2),
    "a draft cut to one token": Pair(models(1), models(1), m=1),
    "a target with cuts": Pair(models(1), models(2), params={"top_k": 4, "top_p": 0.9, "temperature": 0.8}),
    "a draft of impossible tokens": Pair(impossible_tokens(), models(2)),
}


def joint_p_value(pair: Pair, num_sequences: int) -> float:
    return p_value_of_fit(generate(pair, num_sequences).counts(), pair.joint())


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_rejection_gives_the_joint_distribution_of_the_target_with(pair: Pair) -> None:
    assert joint_p_value(pair, 6_000) > FALSE_ALARM_RATE


@pytest.mark.long
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_rejection_gives_the_joint_distribution_of_the_target_in_many_samples_with(pair: Pair) -> None:
    assert joint_p_value(pair, 200_000) > FALSE_ALARM_RATE


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    outcome = generate(Pair(models(1), models(1)), 3_000)
    assert outcome.num_verified == 3 * 3_000
    assert outcome.num_accepted == outcome.num_verified


def test_a_token_of_zero_target_probability_is_never_emitted() -> None:
    draft = models(2)
    draft[:, [1, 4]] += 3.0
    outcome = generate(Pair(impossible_tokens(), draft), 3_000)
    assert not np.isin(outcome.tokens, [1, 4]).any()
    assert outcome.num_accepted < 0.5 * outcome.num_verified


@pytest.mark.parametrize(
    "shared",
    [{Purpose.ACCEPT: Purpose.DRAFT}, {Purpose.RESIDUAL: Purpose.DRAFT}, {Purpose.RESIDUAL: Purpose.ACCEPT}],
    ids=str,
)
def test_the_joint_test_sees_noise_that_two_purposes_share(
    shared: dict[Purpose, Purpose], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(seed: int, choice: int, purpose: Purpose, t: int) -> float:
        return uniform(seed, choice, shared.get(purpose, purpose), t)

    monkeypatch.setattr(rejection, "uniform", wrong)
    assert joint_p_value(PAIRS["a draft that disagrees strongly"], 6_000) < FALSE_ALARM_RATE


def test_the_joint_test_sees_a_draft_that_drops_tokens_for_their_own_low_probability() -> None:
    pair = dataclasses.replace(PAIRS["a draft that agrees somewhat"], drop_below=0.25)
    assert joint_p_value(pair, 6_000) < FALSE_ALARM_RATE


def test_the_joint_test_sees_a_draft_that_sends_other_probabilities_than_it_draws_from() -> None:
    pair = dataclasses.replace(PAIRS["a draft that disagrees strongly"], flatten=0.5)
    assert joint_p_value(pair, 6_000) < FALSE_ALARM_RATE
