from collections import Counter
from typing import Any

import pytest
import torch

from specdec.engine.sampling.noise import Purpose, gumbel, noise_key
from specdec.engine.sampling.sampler import RowContext, Sampler, TokenHistory
from tests.support.cost import lines_run
from tests.support.engine.sampling_rows import PROMPT, VOCAB_SIZE, make_logits, make_row, make_sampler
from tests.support.for_each import for_each

# ---- the draw ----------------------------------------------------------------------------------------------------


@for_each("vocab_size", [1, 2, 63, 512, 513, 5000])
@for_each("scale", [0.0, 0.3, 3.0, 30.0])
def test_pruned_sampling_equals_noise_for_every_token(path: str, vocab_size: int, scale: float) -> None:
    logits = make_logits(6, vocab_size, scale=scale)
    rows = [make_row(position=t, temperature=0.8, choice=t) for t in range(6)]
    keys = torch.tensor([noise_key(17, t, Purpose.PLAIN, t) for t in range(6)])
    scores = (logits - logits.amax(1, keepdim=True)) / torch.tensor(0.8)
    scores += gumbel(keys, torch.arange(vocab_size))
    ranked = [sorted(range(vocab_size), key=lambda v: (-row[v], v)) for row in scores.tolist()]
    sampler = make_sampler(vocab_size, path)
    assert sampler.sample(logits, rows) == [order[0] for order in ranked]
    for r, found in enumerate(sampler.candidates(logits, rows, 5)):
        assert [candidate.token_id for candidate in found] == ranked[r][:5]
        assert [candidate.score for candidate in found] == scores[r, ranked[r][:5]].tolist()


def random_rows(num_rows: int, seed: int) -> list[RowContext]:
    generator = torch.Generator().manual_seed(seed)

    def pick(*values: float) -> float:
        return values[int(torch.randint(len(values), (), generator=generator))]

    return [
        make_row(
            seed=int(pick(0, 1, 2**64 - 1)),
            choice=int(pick(0, 3)),
            temperature=pick(0.0, 1e-6, 0.7, 1.0, 5.0),
            top_k=int(pick(0, 0, 1, 7, 400)),
            top_p=pick(1.0, 1.0, 0.0, 0.4, 0.95),
            min_p=pick(0.0, 0.0, 0.02, 1.0),
            repetition_penalty=pick(1.0, 1.3, 0.7),
            presence_penalty=pick(0.0, 1.0),
            frequency_penalty=pick(0.0, 0.2),
            logit_bias={3: pick(-100.0, 100.0, -1e30)} if pick(0, 1) else {},
            min_tokens=int(pick(0, 50)),
            eos_token_ids=(2,),
            extra_tokens=(9, 31) if pick(0, 1) else (),
        )
        for _ in range(num_rows)
    ]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("seed", range(8))
def test_native_and_torch_paths_agree_to_the_bit(seed: int) -> None:
    native, plain = make_sampler(VOCAB_SIZE, "native"), make_sampler(VOCAB_SIZE, "torch")
    logits, rows = make_logits(16, VOCAB_SIZE + 4, seed), random_rows(16, seed)
    if seed % 2:
        logits = logits.round()  # many ties
    assert native.sample(logits, rows) == plain.sample(logits, rows)
    assert native.candidates(logits, rows, 9) == plain.candidates(logits, rows, 9)
    assert torch.equal(native.process(logits, rows), plain.process(logits, rows))
    assert torch.equal(native.probs(logits, rows), plain.probs(logits, rows))
    assert native.draft_sample(logits, rows) == plain.draft_sample(logits, rows)


@pytest.mark.parametrize("seed", range(4))
def test_a_row_does_not_depend_on_the_rows_beside_it(sampler: Sampler, seed: int) -> None:
    logits, rows = make_logits(12, VOCAB_SIZE + 4, seed), random_rows(12, seed)
    chosen = list(range(12))
    together = (
        sampler.sample(logits, rows),
        sampler.process(logits, rows),
        sampler.probs(logits, rows),
        sampler.draft_sample(logits, rows),
        sampler.logprobs(logits, rows, chosen),
    )
    for begin, end in [(r, r + 1) for r in range(12)] + [(2, 5), (3, 11)]:
        part, part_rows = logits[begin:end], rows[begin:end]
        assert sampler.sample(part, part_rows) == together[0][begin:end]
        assert torch.equal(sampler.process(part, part_rows), together[1][begin:end])
        assert torch.equal(sampler.probs(part, part_rows), together[2][begin:end])
        assert sampler.draft_sample(part, part_rows) == together[3][begin:end]
        assert sampler.logprobs(part, part_rows, chosen[begin:end]) == together[4][begin:end]


@pytest.mark.parametrize("seed", range(4))
def test_the_token_is_the_best_of_process_plus_noise(sampler: Sampler, seed: int) -> None:
    logits, rows = make_logits(16, seed=seed), random_rows(16, seed)
    scores = sampler.process(logits, rows)
    for r, row in enumerate(rows):
        perturbed = scores[r].clone()
        if not row.params.is_greedy:
            key = noise_key(row.params.seed, row.params.choice, Purpose.PLAIN, row.position)
            perturbed += gumbel(torch.tensor([key]), torch.arange(VOCAB_SIZE))[0]
        expected = int((perturbed == perturbed.max()).nonzero()[0])
        assert sampler.sample(logits[r : r + 1], [row]) == [expected]


@pytest.mark.parametrize("seed", range(4))
def test_no_legal_input_makes_nan_and_some_token_always_stays(sampler: Sampler, seed: int) -> None:
    logits, rows = make_logits(32, seed=seed, scale=100.0), random_rows(32, seed)
    assert not sampler.process(logits, rows).isnan().any()
    probs = sampler.probs(logits, rows)
    assert torch.allclose(probs.sum(1), torch.ones(32), atol=1e-5)
    assert all(probs[r, token_id] > 0 for r, token_id in enumerate(sampler.sample(logits, rows)))


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6, 1e-3])
def test_tiny_temperatures_choose_the_best_token(sampler: Sampler, temperature: float) -> None:
    logits = make_logits(4, scale=1000.0)
    rows = [make_row(position=t, temperature=temperature) for t in range(4)]
    assert not sampler.probs(logits, rows).isnan().any()
    assert sampler.sample(logits, rows) == logits.argmax(1).tolist()


def test_greedy_ties_go_to_the_lowest_token_id(sampler: Sampler) -> None:
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[0, [40, 200]] = 1.0
    logits[2, [299, 298]] = 1.0
    rows = [make_row(temperature=0.0)] * 3
    assert sampler.sample(logits, rows) == [40, 0, 298]
    assert sampler.probs(logits, rows).argmax(1).tolist() == [40, 0, 298]


def test_ties_with_noise_go_to_the_lowest_token_id(sampler: Sampler) -> None:
    # Logits that cancel the noise: what is left is a few distinct values of rounding.
    noise = gumbel(torch.tensor([noise_key(17, 0, Purpose.PLAIN, 9)]), torch.arange(VOCAB_SIZE))
    scores = (-noise - (-noise).max() + noise)[0].tolist()
    assert len(set(scores)) < VOCAB_SIZE // 10
    (found,) = sampler.candidates(-noise, [make_row()], VOCAB_SIZE)
    assert [c.token_id for c in found] == sorted(range(VOCAB_SIZE), key=lambda v: (-scores[v], v))


def test_padded_token_ids_are_never_sampled(sampler: Sampler) -> None:
    logits = make_logits(8, VOCAB_SIZE + 20)
    logits[:, VOCAB_SIZE:] = 100.0
    rows = [make_row(position=t, temperature=float(t % 2)) for t in range(8)]
    assert max(sampler.sample(logits, rows)) < VOCAB_SIZE
    assert sampler.probs(logits, rows).shape == (8, VOCAB_SIZE)


def test_sampling_leaves_the_logits_as_they_are(sampler: Sampler) -> None:
    logits, rows = make_logits(16), random_rows(16, 1)
    before = logits.clone()
    sampler.sample(logits, rows)
    sampler.process(logits, rows)
    sampler.draft_sample(logits, rows)
    sampler.logprobs(logits, rows, [0] * 16)
    assert torch.equal(logits, before)


def test_extra_tokens_count_as_if_they_were_committed(sampler: Sampler) -> None:
    logits = make_logits(1)
    changed: dict[str, Any] = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.3}
    speculative = make_row(extra_tokens=(9, 60, 60), **changed)
    committed = make_row(**changed)
    assert committed.history is not None
    committed.history.append([9, 60, 60])
    committed = RowContext(committed.params, speculative.position, len(PROMPT), committed.history)
    assert torch.equal(sampler.process(logits, [speculative]), sampler.process(logits, [committed]))


def test_penalties_at_a_position_that_contradicts_the_history_are_refused(sampler: Sampler) -> None:
    with pytest.raises(ValueError, match="history"):
        sampler.sample(make_logits(1), [make_row(position=3, repetition_penalty=1.5)])


# ---- log-probabilities -------------------------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_logits_with_the_best_alternatives(sampler: Sampler) -> None:
    logits = make_logits(3, VOCAB_SIZE + 4)
    rows = [
        make_row(),
        make_row(num_logprobs=0, temperature=0.3, top_k=1),
        make_row(num_logprobs=3, temperature=0.0, repetition_penalty=2.0, logit_bias={9: 100.0}),
    ]
    expected = logits[:, :VOCAB_SIZE].double().log_softmax(1)
    nothing, only_chosen, best = sampler.logprobs(logits, rows, [1, 2, 3])
    assert nothing is None
    assert only_chosen is not None
    assert best is not None
    assert only_chosen.logprob == pytest.approx(float(expected[1, 2]), rel=1e-12)
    assert only_chosen.top == []
    assert best.logprob == pytest.approx(float(expected[2, 3]), rel=1e-12)
    values, token_ids = expected[2].topk(3)
    assert [token_id for token_id, _ in best.top] == token_ids.tolist()
    assert [logprob for _, logprob in best.top] == pytest.approx(values.tolist(), rel=1e-12)


def test_tied_alternatives_are_the_lowest_ids(sampler: Sampler) -> None:
    (found,) = sampler.logprobs(torch.zeros(1, VOCAB_SIZE), [make_row(num_logprobs=4)], [9])
    assert found is not None
    assert [token_id for token_id, _ in found.top] == [0, 1, 2, 3]


# ---- history -----------------------------------------------------------------------------------------------------


def counts_of(history: TokenHistory, extra: tuple[int, ...] = ()) -> tuple[set[int], Counter[int]]:
    token_ids, seen, num_output = history.counts(extra)
    seen_ids = {int(t) for t, is_seen in zip(token_ids, seen, strict=True) if is_seen}
    return seen_ids, Counter({int(t): int(n) for t, n in zip(token_ids, num_output, strict=True) if n})


def test_history_counts_as_a_recount_would_through_appends() -> None:
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(200, (40,), generator=generator).tolist()
    history, tokens = TokenHistory(prompt), list(prompt)
    for _ in range(60):
        new = torch.randint(200, (7,), generator=generator).tolist()
        history.append(new)
        tokens += new
        extra = tuple(torch.randint(260, (3,), generator=generator).tolist())
        assert len(history) == len(tokens)
        assert counts_of(history) == (set(tokens), Counter(tokens[40:]))
        assert counts_of(history, extra) == ({*tokens, *extra}, Counter([*tokens[40:], *extra]))


def test_history_of_a_long_prompt_is_counted_without_a_line_of_python_for_each_token() -> None:
    """Every session of an engine waits while one is opened."""
    prompt = torch.randint(150_000, (100_000,), generator=torch.Generator().manual_seed(0)).tolist()
    assert lines_run(lambda: TokenHistory(prompt)) < 1000
    history = TokenHistory(prompt)
    history.append([150_000, prompt[0], 150_000])
    assert len(history) == len(prompt) + 3
    assert counts_of(history) == ({*prompt, 150_000}, Counter([150_000, prompt[0], 150_000]))
