"""Drawing tokens from logits: the same function of (logits, parameters, seed, position) at draft and target."""

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
    CutArguments,
    RowContext,
    adjusted_logits,
    cut_arguments,
    temperature_scores,
)
from specdec.engine.sampling.noise import Purpose, noise_key, uniform
from specdec.engine.sampling.perturbed_top import perturbed_top
from specdec.engine.sampling.rejection import DraftSample, draw
from specdec.engine.sampling.token_history import TokenHistory

__all__ = ["DraftSample", "RowContext", "Sampler", "ScoredToken", "TokenHistory", "TokenLogprobs"]

NativeMode = Literal["auto", "on", "off"]

_DEVICE_ROWS = 64
"""Rows sampled at once on a GPU: noise and sorted scores of 512 rows of 128,000 would be gigabytes."""
DRAFT_SUPPORT = 64
"""Most tokens that a draft's distribution has in rejection mode."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token and its score with noise; of two, the higher is the likelier to be the target's token."""

    token_id: int
    score: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities of the model as it is: before bias, penalties, temperature and cuts. Where logits are
    masked, of what the mask leaves."""

    logprob: float
    """Of the chosen token."""
    top: list[tuple[int, float]]
    """The most likely tokens, best first, ties by rising id; none that is masked."""


class Sampler:
    """Draws tokens; stateless, and row-invariant: a row's result depends on that row's logits and context only.

    From finite logits (minus infinity masks a token) legal parameters always draw one. A row that holds NaN or plus
    infinity, or leaves no token to draw, has a result of its own in every method, and costs other rows nothing.

    Everywhere `logits` is [R, V'] float32 with V' >= vocab_size on the sampler's device; ids past vocab_size are
    padding of the model's and are never sampled. It is never written to.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str,
        *,
        native: NativeMode = "auto",
        rows_at_once: int | None = None,
    ) -> None:
        """Make a sampler for `vocab_size` true token ids.

        Args:
            vocab_size: ids at and past it are never sampled.
            device: of the logits.
            native: C++ kernels for the CPU: "auto" takes them where they are built or can be, "on" demands them, "off"
                does without. The results are the same.
            rows_at_once: the most rows for which scores and noise are in memory together; None: all on a CPU, 64
                elsewhere. It changes no result.

        Raises:
            NativeUnavailable: `native` is "on" and there are none.
            UnsupportedIsa: this CPU cannot run those that the environment chose.
        """
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._rows_at_once = rows_at_once or (None if self.device.type == "cpu" else _DEVICE_ROWS)
        self.is_native = False
        self._perturbed_top = perturbed_top
        self._most_top: int | None = None
        self._cut_ = logit_processors.cut_
        self._device_cuts: Callable[[Tensor, list[float], CutArguments], Tensor] | None = None
        if self.device.type == "cuda":
            from specdec.engine.cuda.cuts import device_cuts  # a CPU has no triton
            from specdec.engine.cuda.sampling import MOST_TOP, device_perturbed_top

            self._perturbed_top, self._most_top = device_perturbed_top, MOST_TOP
            self._device_cuts = device_cuts
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

    def sample(self, logits: Tensor, rows: Sequence[RowContext]) -> list[int | None]:
        """Return the token of each row: argmax of scores plus the noise of its position, or of logits if greedy.

        None stands for a row from which no token can be drawn.
        Ties go to the lowest id. Exact: the noise of a seed that is not fixed beforehand makes this a sample of
        softmax(scores).
        """
        token_ids, scores = self._top(logits, rows, 1)
        pairs = zip(token_ids, scores, strict=True)
        return [token_id if math.isfinite(score) else None for token_id, score in pairs]

    def candidates(self, logits: Tensor, rows: Sequence[RowContext], num_candidates: int) -> list[list[ScoredToken]]:
        """Return per row the best tokens with noise, best first; the first is what `sample` returns.

        There are fewer than `num_candidates` where fewer can be drawn, and none where `sample` returns None.
        """
        n = min(num_candidates, self.vocab_size)
        token_ids, scores = self._top(logits, rows, n)
        found = [ScoredToken(*pair) for pair in zip(token_ids, scores, strict=True)]
        return [
            [candidate for candidate in found[r * n : (r + 1) * n] if candidate.score > -math.inf]
            for r in range(len(rows))
        ]

    def process(self, logits: Tensor, rows: Sequence[RowContext]) -> Tensor:
        """Return what tokens are drawn from, [R, vocab_size]: 0 for the best of a row, -inf for what is cut off.

        Greedy rows are the adjusted logits, without temperature and cuts. Other rows from which no token can be drawn
        hold NaN, and no number above minus infinity.
        """
        adjusted = adjusted_logits(self._true_logits(logits), rows)
        scores, _ = self._cut_scores(adjusted, rows)
        plain = [r for r, row in enumerate(rows) if not row.params.has_cuts and not row.params.is_greedy]
        if plain:
            scores = scores.clone() if scores is adjusted else scores
            scores[plain] = temperature_scores(adjusted[plain], [rows[r].params.temperature for r in plain])
        return scores

    def probs(self, logits: Tensor, rows: Sequence[RowContext]) -> Tensor:
        """Return the distribution each row is drawn from, [R, vocab_size] float32; one-hot for greedy rows.

        A row from which no token can be drawn is NaN.
        """
        scores = self.process(logits, rows)
        probs = torch.softmax(scores.to(torch.float64), dim=1).to(torch.float32)
        greedy = [r for r, row in enumerate(rows) if row.params.is_greedy]
        if greedy:
            token_ids, best = self._perturbed_top(scores[greedy], [0.0] * len(greedy), [0] * (2 * len(greedy)), 1)
            probs[greedy] = 0.0
            probs[greedy, token_ids] = 1.0
            if spoiled := [r for r, score in zip(greedy, best, strict=True) if not math.isfinite(score)]:
                probs[spoiled] = math.nan
        return probs

    def draft_sample(
        self,
        logits: Tensor,
        rows: Sequence[RowContext],
        m: int = DRAFT_SUPPORT,
        chains: Sequence[int] | None = None,
    ) -> list[DraftSample | None]:
        """Draw a token per row for rejection verification, from the row's m likeliest tokens.

        `chains` has of each row which chain the draw is for (`noise.uniform`).

        The pairs in the result are float32 and are what the token is drawn from. They are renormalised only if
        something was cut off: where all fits in m, q is p to the bit for equal logits. None stands for a row from
        which no token can be drawn.
        """
        mass, token_ids = sparse_distributions(self.probs(logits, rows), m)
        samples: list[DraftSample | None] = []
        of_rows = [None] * len(rows) if chains is None else chains
        for row, chain, values, ids in zip(rows, of_rows, mass.tolist(), token_ids.tolist(), strict=True):
            size = sum(prob > 0.0 for prob in values)  # they fall, and NaN is not above 0
            if not size:
                samples.append(None)
                continue
            support, probs = tuple(ids[:size]), tuple(values[:size])
            u = uniform(row.params.seed, row.params.choice, Purpose.DRAFT, row.position, chain)
            samples.append(DraftSample(draw(support, probs, u), support, probs))
        return samples

    def logprobs(self, logits: Tensor, rows: Sequence[RowContext], chosen: Sequence[int]) -> list[TokenLogprobs | None]:
        """Return the raw log-probabilities of the chosen tokens and of the best ones, None for rows without.

        Raises:
            NonFiniteLogits: a row holds NaN or plus infinity, or nothing above minus infinity. Ask for rows only for
                which `sample` has a token.
        """
        result: list[TokenLogprobs | None] = [None] * len(rows)
        wanted = [r for r, row in enumerate(rows) if row.params.num_logprobs is not None]
        if not wanted:
            return result
        raw = self._true_logits(logits)[wanted].to(torch.float64)
        total = torch.logsumexp(raw, dim=1, keepdim=True)
        raw = raw - total  # [wanted, V]
        columns = torch.tensor([chosen[r] for r in wanted], device=raw.device)
        # In one transfer.
        of_chosen, totals = torch.cat([raw.gather(1, columns.unsqueeze(1)), total], dim=1).t().tolist()
        if not all(map(math.isfinite, totals)):
            raise NonFiniteLogits
        for r, values, logprob in zip(wanted, raw, of_chosen, strict=True):
            result[r] = TokenLogprobs(logprob, _best(values, rows[r].params.num_logprobs or 0))
        return result

    def _true_logits(self, logits: Tensor) -> Tensor:
        return logits[:, : self.vocab_size].to(torch.float32)

    def _top(self, logits: Tensor, rows: Sequence[RowContext], num_top: int) -> tuple[list[int], list[float]]:
        # Cuts sort whole rows: that is what memory limits where the rest is done by kernels.
        is_heavy = self._most_top is None or any(row.params.has_cuts for row in rows)
        most = self._rows_at_once if is_heavy else None
        if most is None or len(rows) <= most:
            return self._top_of_few(logits, rows, num_top)
        parts = [self._top_of_few(logits[i : i + most], rows[i : i + most], num_top) for i in range(0, len(rows), most)]
        return [token for ids, _ in parts for token in ids], [score for _, scores in parts for score in scores]

    def _top_of_few(self, logits: Tensor, rows: Sequence[RowContext], num_top: int) -> tuple[list[int], list[float]]:
        adjusted = adjusted_logits(self._true_logits(logits), rows)
        scores, temperatures = self._cut_scores(adjusted, rows)
        keys: list[int] = []
        for row in rows:
            params = row.params
            keys += (0, 0) if params.is_greedy else noise_key(params.seed, params.choice, Purpose.PLAIN, row.position)
        if self._most_top is not None and num_top > self._most_top:
            return perturbed_top(scores, temperatures, keys, num_top)
        return self._perturbed_top(scores, temperatures, keys, num_top)

    def _cut_scores(self, adjusted: Tensor, rows: Sequence[RowContext]) -> tuple[Tensor, list[float]]:
        """Return logits, where rows with cuts are processed scores, and each row's remaining temperature."""
        temperatures = [
            0.0 if row.params.is_greedy else max(row.params.temperature, logit_processors.MIN_TEMPERATURE)
            for row in rows
        ]
        cut = [r for r, row in enumerate(rows) if row.params.has_cuts]
        if not cut:
            return adjusted, temperatures
        if self._device_cuts is not None:
            of_rows = [temperatures[r] if row.params.has_cuts else 0.0 for r, row in enumerate(rows)]
            for r in cut:
                temperatures[r] = 1.0
            return self._device_cuts(adjusted, of_rows, cut_arguments(rows)), temperatures
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
    """Return the n highest values with their ids, best first, ties by rising id."""
    n = min(n, int((values > -math.inf).sum())) if n else 0
    if n == 0:
        return []
    ids = (values >= values.topk(n).values[-1]).nonzero().squeeze(1)
    pairs = sorted(zip((-values[ids]).tolist(), ids.tolist(), strict=True))[:n]
    return [(token_id, -negated) for negated, token_id in pairs]


def sparse_distributions(probs: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of rows, best first, ties by rising id: probabilities and ids, [R, M] float32 and int64.

    M is `num_tokens`, or all. Probabilities are renormalised where something was cut off, and only there. Nothing waits
    for data. Rows of NaN stay so.

    Args:
        probs: [R, V] float32.
        num_tokens: at least 1.
    """
    best, ids = probs.topk(min(num_tokens, probs.shape[1]), dim=1)
    if num_tokens < probs.shape[1]:
        scaled = (best.to(torch.float64) / best.to(torch.float64).sum(dim=1, keepdim=True)).to(torch.float32)
        was_cut = (probs > 0.0).sum(dim=1, keepdim=True) > num_tokens
        best = torch.where(was_cut, scaled, best)
    ids, order = ids.sort(dim=1)
    best, order = best.gather(1, order).sort(dim=1, descending=True, stable=True)
    return best, ids.gather(1, order)
