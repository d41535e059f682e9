"""Measures in one pass how many of a session's last tokens a pass with skipped sublayers reproduces."""

from __future__ import annotations

from dataclasses import replace

from specdec.drafting.heads.session import HeadAsk
from specdec.drafting.heads.target import HeadTarget
from specdec.engine.model.beside import PassRows, SkippingPass
from specdec.wire.sampling_params import SamplingParams

WINDOW = 32
"""Tokens that one measurement compares, at most."""


def matchness(target: HeadTarget, run: SkippingPass, ask: HeadAsk) -> float | None:
    """The share of a session's last tokens that a draft would have sampled, each after the true previous tokens.

    None if fewer than two tokens are output, or no blocks are free. Tokens before the window use the full target's keys
    and values; those of the window go into temporary blocks.
    """
    seq = ask.seq
    if seq is None:
        return None
    start = max(ask.row.num_prompt_tokens - 1, len(seq.token_ids) - 1 - WINDOW)
    num_rows = len(seq.token_ids) - 1 - start
    pool, size = target.engine.block_pool, target.runner.block_size
    num_blocks = -(-num_rows // size)
    if num_rows < 2 or pool.stats().free < num_blocks:
        return None
    blocks = pool.allocate(num_blocks)
    try:
        slots = [block * size + offset for block in blocks for offset in range(size)]
        rows = PassRows(size)
        rows.add_sequence(seq.block_ids)
        for index in range(num_rows):
            rows.add_apart(seq.token_ids[start + index], start, slots[: index + 1])
        logits = run(rows.batch(target.runner.device))
    finally:
        pool.free(blocks)
    params = _plain(ask.row.params, ask.is_chain)
    contexts = [ask.row._replace(params=params, position=start + 1 + index, history=None) for index in range(num_rows)]
    drawn = target.sampler.sample(logits, contexts)
    right = sum(token == seq.token_ids[start + 1 + index] for index, token in enumerate(drawn))
    return right / num_rows


def _plain(params: SamplingParams, is_greedy: bool) -> SamplingParams:
    """Parameters without penalties and the like, which depend on earlier tokens; greedy if they did or `is_greedy`."""
    if params.adjusts_logits:
        return SamplingParams(max_tokens=1, seed=0, temperature=0.0)
    return replace(params, temperature=0.0) if is_greedy else params
