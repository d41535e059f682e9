"""Raw log-probabilities as wire messages."""

from __future__ import annotations

import torch

from specdec.engine.errors import NonFiniteLogits
from specdec.engine.sampling.sampler import TokenLogprobs
from specdec.v1 import common_pb2 as pb

LEAST_LOGPROB = -9999.0
"""Value reported in place of minus infinity."""
_MOST_SLICE_NUMBERS = 2**23
"""Number of logits converted at once: 64 MiB in double precision, for any vocabulary and length of a chunk."""


def position_logprobs(entry: TokenLogprobs | None) -> pb.PositionLogprobs:
    """One position's log-probabilities as a message; None: an empty one."""
    if entry is None:
        return pb.PositionLogprobs()
    top = [pb.TokenLogprob(token_id=token, logprob=logprob) for token, logprob in entry.top]
    return pb.PositionLogprobs(logprob=entry.logprob, top=top)


def prompt_logprobs(
    logits: torch.Tensor, next_token_ids: list[int], num_top: int, vocab_size: int
) -> list[pb.PositionLogprobs]:
    """Log-probabilities of prompt tokens given the logits before them.

    Args:
        logits: [N, V] float32, rows of consecutive prompt tokens.
        next_token_ids: [N], the prompt token after each row.
        num_top: number of likeliest tokens to report at each position.
        vocab_size: number of token ids; columns from here on are padding.

    Raises:
        NonFiniteLogits: a row holds NaN or plus infinity, or nothing above minus infinity.
    """
    most_rows = max(1, _MOST_SLICE_NUMBERS // vocab_size)
    return [
        position
        for start in range(0, len(next_token_ids), most_rows)
        for position in _slice_logprobs(logits[start:], next_token_ids[start : start + most_rows], num_top, vocab_size)
    ]


def node_logprobs(logits: torch.Tensor, token_ids: list[int], vocab_size: int) -> list[float]:
    """Log-probability of each token in its own row, at least `LEAST_LOGPROB`; that also where it is not finite.

    Args:
        logits: [N, V] float32; rows off the walked path may hold NaN.
        token_ids: [N], the token of each row.
        vocab_size: number of token ids; columns from here on are padding.
    """
    raw = torch.log_softmax(logits[:, :vocab_size].to(torch.float64), dim=-1)
    chosen = raw.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1)).squeeze(1)
    least = LEAST_LOGPROB
    return torch.nan_to_num(chosen, nan=least, posinf=least, neginf=least).clamp(min=least).tolist()


def _slice_logprobs(
    logits: torch.Tensor, next_token_ids: list[int], num_top: int, vocab_size: int
) -> list[pb.PositionLogprobs]:
    raw = logits[: len(next_token_ids), :vocab_size].to(torch.float64)
    if not bool(raw.amax(dim=-1).isfinite().all()):
        raise NonFiniteLogits
    logprobs = torch.log_softmax(raw, dim=-1)
    num_top = min(num_top, vocab_size)
    chosen = logprobs.gather(1, torch.tensor(next_token_ids, device=logits.device).unsqueeze(1)).squeeze(1).tolist()
    values, ids = (t.tolist() for t in logprobs.topk(num_top, dim=-1)) if num_top else ([], [])
    return [
        pb.PositionLogprobs(
            logprob=logprob,
            top=[pb.TokenLogprob(token_id=i, logprob=v) for i, v in zip(ids[row], values[row], strict=True)]
            if num_top
            else [],
        )
        for row, logprob in enumerate(chosen)
    ]
