"""A tiny deterministic pair: the exact runner's digests, turned into logits over a small vocabulary.

A row's logits follow from its token, its position and all slots that it attends to, so that one wrong, stale or
missing slot changes what is sampled. The draft's differ from the target's at every third place or so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache

import torch

from specdec.coordinator.text.tokenizer import TextTokenizer
from specdec.engine.block_pool import BlockPool
from specdec.engine.engine import Engine
from specdec.engine.sampling.sampler import RowContext, Sampler
from specdec.engine.sampling.token_history import TokenHistory
from specdec.engine.scheduler import Scheduler
from specdec.replica.worker.build import BuiltEngine
from specdec.v1 import common_pb2 as pb
from specdec.wire.sampling_params import SamplingParams
from tests.support.engine.exact_runner import ExactRunner, prefix_contents
from tests.support.scripted.model import EOS, NUM_SPECIAL, make_tokenizer

BLOCK_SIZE = 4
NUM_BLOCKS = 40
"""Too few for all sessions at once, so that some are preempted."""
MAX_MODEL_LEN = 64
_LIKELY = (3.0, 2.0, 1.2, 0.5)
"""Logits of the tokens that can follow; all others are hardly ever sampled."""
_UNLIKELY = -40.0
_ENDS_BELOW = 8
"""Of 256: how often a sequence may end by itself."""


@cache
def tokenizer_json() -> bytes:
    """Of both models."""
    encoded: bytes = make_tokenizer().to_str().encode()
    return encoded


@cache
def vocab_size() -> int:
    """Of both models."""
    size: int = make_tokenizer().get_vocab_size()
    return size


@cache
def tokenizer() -> TextTokenizer:
    """For those who compare texts."""
    return TextTokenizer(tokenizer_json(), {})


@lru_cache(maxsize=50_000)
def _row(content: bytes, is_draft: bool) -> torch.Tensor:
    size = vocab_size()
    ids = [NUM_SPECIAL + int.from_bytes(content[2 * i : 2 * i + 2], "big") % (size - NUM_SPECIAL) for i in range(4)]
    if content[7] < _ENDS_BELOW:
        ids[0] = EOS
    if is_draft and content[6] % 3 == 0:
        ids[:2] = ids[1::-1]
    row = torch.full((size,), _UNLIKELY)
    for token_id, logit in zip(reversed(ids), reversed(_LIKELY), strict=True):
        row[token_id] = logit
    return row


class TinyRunner(ExactRunner):
    """The exact runner with a vocabulary."""

    def __init__(self, role: str, on_forward: Callable[[], None]) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_SIZE)
        self._is_draft = role == "draft"
        self._on_forward = on_forward

    def logits_of(self, content: bytes) -> torch.Tensor:
        """[V] float32."""
        return _row(content, self._is_draft)

    def forward(self, batch: object) -> torch.Tensor:
        """As the exact runner; an empty result has the vocabulary's width, too."""
        self._on_forward()
        logits = super().forward(batch)  # type: ignore[arg-type]
        return logits if len(logits) else torch.zeros(0, vocab_size())


@cache
def sampler() -> Sampler:
    """Stateless, so one for all; without the kernels, whose results are the same."""
    return Sampler(vocab_size(), "cpu", native="off")


def identity(role: str) -> pb.ModelIdentity:
    """What replicas of a role say that they serve."""
    return pb.ModelIdentity(
        name=f"tiny-{role}",
        architecture="Exact",
        weights_digest=role,
        tokenizer_digest="tiny",
        numerics_id="exact",
        row_invariant=True,
        vocab_size=vocab_size(),
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=[EOS],
    )


def build(role: str, instance_id: str, on_forward: Callable[[], None] = lambda: None) -> BuiltEngine:
    """An engine with an empty cache."""
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    scheduler = Scheduler(pool, max_batch_tokens=32, max_batch_seqs=8, max_model_len=MAX_MODEL_LEN)
    info = pb.GetReplicaInfoResponse(identity=identity(role), version="tiny", instance_id=instance_id)
    return BuiltEngine(Engine(TinyRunner(role, on_forward), pool, scheduler), sampler(), info)


@lru_cache(maxsize=10_000)
def reference(prompt: tuple[int, ...], seed: int, choice: int, temperature: float, max_tokens: int) -> tuple[int, ...]:
    """The output of an undisturbed target, computed without any cache."""
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed, choice=choice)
    history, tokens = TokenHistory(prompt), list(prompt)
    while len(tokens) - len(prompt) < max_tokens and len(tokens) < MAX_MODEL_LEN:
        content = prefix_contents(tuple(tokens))[-8:]
        context = RowContext(params, len(tokens), len(prompt), history, ())
        (token,) = sampler().sample(_row(content, False).unsqueeze(0), [context])
        assert token is not None
        tokens.append(token)
        history.append([token])
        if token == EOS:
            break
    return tuple(tokens[len(prompt) :])
