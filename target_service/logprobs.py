"""Raw log-probabilities as wire messages."""

from __future__ import annotations

import torch

from specdec.engine.errors import NonFiniteLogits
from specdec.engine.sampling.sampler import TokenLogprobs
from specdec.v1 import common_pb2 as pb
from target_service.session import SessionState, TargetSession


def position_logprobs(entry: TokenLogprobs | None) -> pb.PositionLogprobs:
    """The sampler's log-probabilities of one position."""
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
        next_token_ids: [N], the prompt token after each.
        num_top: number of alternatives.
        vocab_size: ids from here on are padding of the model's.

    Raises:
        NonFiniteLogits: a row holds NaN or plus infinity, or nothing above minus infinity.
    """
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


def take_prompt_logprobs(session: TargetSession, logits: torch.Tensor, start: int, vocab_size: int) -> None:
    """Add what a chunk of prefill says about the prompt to what is known of it.

    Args:
        session: one that wants log-probabilities of its prompt.
        logits: [N, V] float32, rows of the chunk.
        start: position of its first token; after a preemption chunks come again.
        vocab_size: as in `prompt_logprobs`.

    Raises:
        NonFiniteLogits: as in `prompt_logprobs`.
    """
    if session.state is not SessionState.PREFILL:
        return
    body = session.body
    num_known = len(session.prompt_logprobs) - start
    new = logits[num_known:]
    following = body.token_ids[start + num_known + 1 : body.num_prompt_tokens][: len(new)]
    if following:
        session.prompt_logprobs += prompt_logprobs(new, list(following), body.num_prompt_logprobs, vocab_size)
