"""Samples tokens from logits: the same function of (logits, parameters, seed, position) at draft and target."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from specdec.engine.errors import NonFiniteLogits
from specdec.engine.native.build import NativeUnavailable
from specdec.engine.native.sampling_ops import NativeSampling
from specdec.engine.sampling import logit_processors
from specdec.engine.sampling.logit_processors import (
    RowContext,
    adjusted_logits,
    cut_arguments,
    row_numbers,
    temperature_scores,
)
from specdec.engine.sampling.noise import Purpose, noise_keys, uniform
from specdec.engine.sampling.perturbed_top import perturbed_top
from specdec.engine.sampling.rejection import DraftSample
from specdec.engine.sampling.scored_ids import read_top
from specdec.engine.sampling.sparse import certain, draw_sparse, read_sparse
from specdec.engine.sampling.token_history import TokenHistory
from specdec.wire.sampling_params import SamplingParams

__all__ = ["DraftSample", "RowContext", "Sampler", "ScoredToken", "TokenHistory", "TokenLogprobs"]

NativeMode = Literal["auto", "on", "off"]

_DEVICE_ROWS = 64
"""Rows sampled at once on a GPU: noise and sorted scores of 512 rows of 128,000 tokens would take gigabytes."""
Top = tuple[list[int], list[float]]
"""Token ids and scores, as `perturbed_top` returns them."""
DRAFT_SUPPORT = 64
"""Greatest number of tokens of a draft's distribution in rejection mode."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token and its score with noise; a higher score is likelier to be the target's token."""

    token_id: int
    score: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities of the masked logits, before bias, penalties, temperature and cuts."""

    logprob: float
    """Log-probability of the chosen token."""
    top: list[tuple[int, float]]
    """The likeliest tokens, best first, ties by ascending id; without masked ones."""


class Sampler:
    """Samples tokens; stateless and row-invariant: a row's result depends only on its logits and context.

    Finite logits (minus infinity masks a token) always give a token. A row that holds NaN or plus infinity, or has no
    token to sample, gets a special result in every method and does not affect other rows.

    In all methods `logits` is [R, V'] float32 on the sampler's device, V' >= vocab_size, and is not changed. Ids from
    vocab_size on are the model's padding.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str,
        *,
        native: NativeMode = "auto",
        rows_at_once: int | None = None,
    ) -> None:
        """Make a sampler.

        Args:
            vocab_size: sampled ids are below it.
            device: device of the logits.
            native: C++ kernels for the CPU: "auto" uses them if available, "on" requires them, "off" does not use them.
                The results are the same. On a GPU "off" samples without Triton.
            rows_at_once: rows whose scores and noise are in memory at once; None: all on a CPU, 64 elsewhere. It does
                not change results.

        Raises:
            NativeUnavailable: `native` is "on" and there are no kernels.
            UnsupportedIsa: this CPU cannot run the kernels that the environment selects.
        """
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.native = native
        self._rows_at_once = rows_at_once or (None if self.device.type == "cpu" else _DEVICE_ROWS)
        self.is_native = False
        self._perturbed_top = perturbed_top
        self._cut_ = logit_processors.cut_
        self._most_top = 0
        if self.device.type == "cuda" and native != "off":
            self.use_device_kernels()
        if native == "off" or self.device.type != "cpu":
            return
        try:
            kernels = NativeSampling()
        except NativeUnavailable:
            if native == "on":
                raise
            return
        self.is_native = True
        self._perturbed_top, self._cut_ = kernels.perturbed_top, kernels.cut_

    def use_device_kernels(self) -> None:
        """Compute scores and draw by Triton's kernels from now on."""
        # Imported here, as a CPU has no Triton.
        from specdec.engine.cuda.sampling import MOST_TOP, device_scores, start_draws

        self._most_top, self._device_scores, self._start_draws = MOST_TOP, device_scores, start_draws

    def compile(self) -> None:
        """Draw once with every kind of cut, so that no stream waits up to ten seconds for a compiler of kernels."""
        params = SamplingParams(max_tokens=1, seed=0, top_k=1, top_p=0.5)
        self.sample(torch.zeros(1, self.vocab_size, device=self.device), [RowContext(params, 0, 0)])

    def sample(self, logits: Tensor, rows: Sequence[RowContext]) -> list[int | None]:
        """The token of each row: argmax of scores plus the position's noise, or of logits if greedy; None if there is
        none.

        Ties go to the lowest id. For a random seed this is an exact sample of softmax(scores).
        """
        return self.start(logits, rows)()

    def start(self, logits: Tensor, rows: Sequence[RowContext]) -> Callable[[], list[int | None]]:
        """Launch `sample`; the returned function waits for its result. On a CPU all is computed at once."""
        parts = self._started(logits, rows, 1)

        def tokens() -> list[int | None]:
            found: list[int | None] = []
            for part in parts:
                found += [token if math.isfinite(score) else None for token, score in zip(*part(), strict=True)]
            return found

        return tokens

    def candidates(self, logits: Tensor, rows: Sequence[RowContext], num_candidates: int) -> list[list[ScoredToken]]:
        """The best tokens of each row with noise, best first; the first is `sample`'s.

        There are fewer than `num_candidates` if fewer can be sampled, and none if `sample` returns None.
        """
        n = min(num_candidates, self.vocab_size)
        token_ids, scores = self.top(logits, rows, n)
        found = [ScoredToken(*pair) for pair in zip(token_ids, scores, strict=True)]
        return [
            [candidate for candidate in found[r * n : (r + 1) * n] if candidate.score > -math.inf]
            for r in range(len(rows))
        ]

    def process(self, logits: Tensor, rows: Sequence[RowContext]) -> Tensor:
        """The scores from which tokens are sampled, [R, vocab_size]: 0 for a row's best, -inf for cut tokens.

        Greedy rows are the adjusted logits, without temperature and cuts. Other rows without a token to sample hold NaN
        and no number above minus infinity.
        """
        adjusted = adjusted_logits(self._true_logits(logits), rows)
        if self._most_top:
            return self._device_scores(adjusted, row_numbers(rows, self.vocab_size))
        scores, _ = self._cut_scores(adjusted, rows)
        plain = [r for r, row in enumerate(rows) if not row.params.has_cuts and not row.params.is_greedy]
        if plain:
            scores = scores.clone() if scores is adjusted else scores
            scores[plain] = temperature_scores(adjusted[plain], [rows[r].params.temperature for r in plain])
        return scores

    def probs(self, logits: Tensor, rows: Sequence[RowContext]) -> Tensor:
        """The distribution from which each row is sampled, [R, vocab_size] float32; one-hot for greedy rows.

        A row without a token to sample is NaN.
        """
        scores = self.process(logits, rows)
        probs = torch.softmax(scores.to(torch.float64), dim=1).to(torch.float32)
        greedy = [r for r, row in enumerate(rows) if row.params.is_greedy]
        if greedy:
            probs[greedy] = certain(scores[greedy])
        return probs

    def draft_sample(
        self,
        logits: Tensor,
        rows: Sequence[RowContext],
        m: int = DRAFT_SUPPORT,
        chains: Sequence[int] | None = None,
    ) -> list[DraftSample | None]:
        """Sample a token per row for rejection verification, from the row's m likeliest tokens.

        `chains`: each row's number of its chain (`noise.uniform`).

        The token is sampled from the float32 pairs in the result. They are renormalised only if tokens were cut: if all
        fit in m, q equals p bit by bit for equal logits. A row without a token to sample gives None.
        """
        of_rows = [None] * len(rows) if chains is None else chains
        points = [
            [uniform(row.params.seed, row.params.choice, Purpose.DRAFT, row.position, chain)]
            for row, chain in zip(rows, of_rows, strict=True)
        ]
        probs = self.probs(logits, rows)
        on_device = torch.tensor(points, dtype=torch.float64).to(probs.device, non_blocking=True)
        return read_sparse(draw_sparse(probs, on_device, min(m, probs.shape[1])).cpu())

    def logprobs(self, logits: Tensor, rows: Sequence[RowContext], chosen: Sequence[int]) -> list[TokenLogprobs | None]:
        """Raw log-probabilities of the chosen tokens and of the best ones; None for rows that want none.

        Raises:
            NonFiniteLogits: a row holds NaN or plus infinity, or nothing above minus infinity; pass only rows for which
                `sample` has a token.
        """
        result: list[TokenLogprobs | None] = [None] * len(rows)
        wanted = [r for r, row in enumerate(rows) if row.params.num_logprobs is not None]
        if not wanted:
            return result
        raw = self._true_logits(logits)[wanted].to(torch.float64)
        total = torch.logsumexp(raw, dim=1, keepdim=True)
        raw = raw - total  # [wanted, V]
        columns = torch.tensor([chosen[r] for r in wanted], device=raw.device)
        # One transfer from the device for both.
        of_chosen, totals = torch.cat([raw.gather(1, columns.unsqueeze(1)), total], dim=1).t().tolist()
        if not all(map(math.isfinite, totals)):
            raise NonFiniteLogits
        for r, values, logprob in zip(wanted, raw, of_chosen, strict=True):
            result[r] = TokenLogprobs(logprob, _best(values, rows[r].params.num_logprobs or 0))
        return result

    def _true_logits(self, logits: Tensor) -> Tensor:
        return logits[:, : self.vocab_size].to(torch.float32)

    def top(self, logits: Tensor, rows: Sequence[RowContext], num_top: int) -> Top:
        """`candidates` as ids and scores, `num_top` for each row, as `perturbed_top` returns them."""
        parts = [part() for part in self._started(logits, rows, num_top)]
        if len(parts) == 1:
            return parts[0]
        return [token for ids, _ in parts for token in ids], [score for _, scores in parts for score in scores]

    def _started(self, logits: Tensor, rows: Sequence[RowContext], num_top: int) -> list[Callable[[], Top]]:
        most = self._rows_at_once or len(rows)
        if len(rows) <= most:
            return [self._started_few(logits, rows, num_top)]
        return [self._started_few(logits[i : i + most], rows[i : i + most], num_top) for i in range(0, len(rows), most)]

    def _started_few(self, logits: Tensor, rows: Sequence[RowContext], num_top: int) -> Callable[[], Top]:
        adjusted = adjusted_logits(self._true_logits(logits), rows)
        places = [
            None if (params := row.params).is_greedy else (params.seed, params.choice, row.position) for row in rows
        ]
        keys = noise_keys(places, Purpose.PLAIN)
        if num_top <= self._most_top:
            drawn = self._start_draws(adjusted, row_numbers(rows, self.vocab_size), keys, num_top)
            return lambda: read_top(drawn())
        scores, temperatures = self._cut_scores(adjusted, rows)
        found = self._perturbed_top(scores, temperatures, keys, num_top)
        return lambda: found

    def _cut_scores(self, adjusted: Tensor, rows: Sequence[RowContext]) -> tuple[Tensor, list[float]]:
        """Logits, or processed scores in rows with cuts, and each row's remaining temperature."""
        temperatures = [
            0.0 if row.params.is_greedy else max(row.params.temperature, logit_processors.MIN_TEMPERATURE)
            for row in rows
        ]
        cut = [r for r, row in enumerate(rows) if row.params.has_cuts]
        if not cut:
            return adjusted, temperatures
        every = len(cut) == len(rows)
        scores = temperature_scores(adjusted if every else adjusted[cut], [temperatures[r] for r in cut])
        self._cut_(scores, *cut_arguments([rows[r] for r in cut]))
        for r in cut:
            temperatures[r] = 1.0
        if every:
            return scores, temperatures
        merged = adjusted.clone(memory_format=torch.contiguous_format)
        merged[cut] = scores
        return merged, temperatures


def _best(values: Tensor, n: int) -> list[tuple[int, float]]:
    """The n highest values with their ids, best first, ties by ascending id."""
    n = min(n, int((values > -math.inf).sum())) if n else 0
    if n == 0:
        return []
    ids = (values >= values.topk(n).values[-1]).nonzero().squeeze(1)
    pairs = sorted(zip((-values[ids]).tolist(), ids.tolist(), strict=True))[:n]
    return [(token_id, -negated) for negated, token_id in pairs]
