"""Times of drafting with an EAGLE-3 head of an 8B model on a GPU: launched kernel by kernel, and replayed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from bench.gpu_slot import models
from bench.gpu_slot.models import BLOCK_SIZE, COPIES, Found, StepSetup
from specdec.drafting.heads.cache import HeadCache
from specdec.drafting.heads.config import HeadConfig, read_config
from specdec.drafting.heads.methods.eagle3 import CAPABILITIES, Eagle3Model
from specdec.drafting.heads.parts import head_sizes
from specdec.drafting.heads.serial import SerialHead
from specdec.drafting.heads.session import Features, HeadAsk, HeadSession
from specdec.drafting.heads.target import HeadTarget
from specdec.drafting.heads.vocabulary import DraftVocabulary
from specdec.drafting.interface import Room
from specdec.engine.attention.kv_cache import LayerGeometry
from specdec.engine.attention.paged import AttentionOptions
from specdec.engine.cuda.buckets import BucketedSteps
from specdec.engine.sampling.sampler import RowContext, Sampler
from specdec.engine.sequence import Sequence as EngineSequence
from specdec.wire.sampling_params import SamplingParams

_TAPS = (2, 16, 29)
_COMMITTED = 3
"""Committed tokens that a head processes before it drafts."""


@dataclass(frozen=True, slots=True)
class _Runner:
    """The part of its target's runner that a head uses."""

    device: torch.device
    dtype: torch.dtype
    hidden_size: int
    max_model_len: int
    replays: BucketedSteps | None
    kernels: None = None


def heads(place: StepSetup) -> Found:
    """Times of drafts of five levels, as chains and as trees, for one session and eight, committed tokens included."""
    found: Found = {COPIES: place.copy_tb_per_s()}
    context, most_sessions = (32, 1) if place.dry else (1024, 8)
    shape = models.SHAPES["tiny" if place.dry else "8b"]
    small = models.make("1b", place, 64)  # only its captured steps are used
    replays = models.replays_of(place, small)
    config = read_config({**shape, "num_hidden_layers": 1, "max_position_embeddings": context + 64})
    model, vocabulary = _made(place, config, shape)
    for name, used in (("eager", None), ("replayed", replays)):
        runner = _Runner(place.device, place.dtype, shape["hidden_size"], context + 64, used)
        sampler = Sampler(shape["vocab_size"], place.device)
        target = HeadTarget(cast(Any, runner), cast(Any, None), sampler)
        for top_k in (1,) if place.dry else (1, 4):
            cache = _cache(place, config, most_sessions, context, target)
            head = SerialHead(
                "eagle3",
                CAPABILITIES,
                _TAPS,
                model,
                target,
                cache,
                vocabulary,
                depth=2 if place.dry else 5,
                top_k=top_k,
                num_nodes=None,
            )
            for num_sessions in (1,) if place.dry else (1, most_sessions):
                asks = _asks(place, shape, num_sessions, context)
                kind = "chain" if top_k == 1 else f"tree of {top_k}"
                found[f"{kind}, {num_sessions} sessions, {name} ms"] = place.median_ms(partial(_draft, head, asks))
                place.keep(found)
    return found


def _made(place: StepSetup, config: HeadConfig, shape: dict[str, int]) -> tuple[Eagle3Model, DraftVocabulary]:
    """A head of random weights that drafts a quarter of the target's vocabulary."""
    num_positions = config.layers.max_position_embeddings
    width, vocab_size = shape["hidden_size"], shape["vocab_size"]
    draft_size = vocab_size // 4
    with torch.device(place.device):
        model = Eagle3Model(config, len(_TAPS), width, vocab_size, draft_size, num_positions)
    model = model.to(place.device, place.dtype).eval().requires_grad_(False)
    return model, DraftVocabulary(torch.arange(draft_size) * 4, draft_size, vocab_size)


def _cache(place: StepSetup, config: HeadConfig, num_sessions: int, context: int, target: HeadTarget) -> HeadCache:
    num_blocks = num_sessions * _blocks_of(context)
    _, num_kv_heads, head_dim = head_sizes(config.layers)
    layers, options = [LayerGeometry(num_kv_heads, head_dim, head_dim)], AttentionOptions(head_dim**-0.5)
    cache = HeadCache(layers, options, num_blocks, BLOCK_SIZE, place.dtype, place.device, target.attention)
    cache.keep(range(num_blocks * BLOCK_SIZE))
    return cache


def _blocks_of(context: int) -> int:
    return -(-(context + 1) // BLOCK_SIZE)


def _asks(place: StepSetup, shape: dict[str, int], num_sessions: int, context: int) -> list[HeadAsk]:
    asks = []
    for line in range(num_sessions):
        blocks = array("i", range(line * _blocks_of(context), (line + 1) * _blocks_of(context)))
        tokens = [token * 7919 % shape["vocab_size"] for token in range(context + 1)]
        seq = EngineSequence(seq_id=line, token_ids=tokens, num_prompt_tokens=context, block_ids=blocks)
        states = torch.randn(_COMMITTED, len(_TAPS), shape["hidden_size"], device=place.device, dtype=place.dtype)
        session = HeadSession()
        session.seq, session.pending = seq, [Features(context - _COMMITTED, states, tokens[-_COMMITTED:])]
        params = SamplingParams(max_tokens=99, seed=line, temperature=1.0)
        asks.append(HeadAsk(session, RowContext(params, context + 1, context), Room(64, 8), False, seq))
    return asks


def _draft(head: SerialHead, asks: Sequence[HeadAsk]) -> None:
    pending = [list(ask.session.pending) for ask in asks]
    if any(offer is None for offer in head.draft(asks)):
        raise AssertionError("a session has no draft")
    for ask, features in zip(asks, pending, strict=True):
        ask.session.pending = features
