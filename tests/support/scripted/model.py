"""The made-up model: the next token is a hash of the tokens before it, the seed and the choice."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from specdec.v1 import common_pb2 as pb

EOS = 1
NUM_SPECIAL = 3


def make_tokenizer() -> Tokenizer:
    """A small byte-level BPE; ids 0 to 2 are special, and 1 is the end of a sequence."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(t, special=True) for t in ("<|bos|>", "<|eos|>", "<|pad|>")],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog, été 你好 🙂"] * 4, trainer)
    return tokenizer


def identity(name: str = "scripted", **changes: Any) -> pb.ModelIdentity:
    """Identity of a scripted replica's model."""
    fields: dict[str, Any] = {
        "name": name,
        "architecture": "Scripted",
        "weights_digest": "w1",
        "tokenizer_digest": "t1",
        "numerics_id": "n1",
        "row_invariant": True,
        "vocab_size": make_tokenizer().get_vocab_size(),
        "max_model_len": 4096,
        "eos_token_ids": [EOS],
    }
    return pb.ModelIdentity(**{**fields, **changes})


def next_token(token_ids: Iterable[int], seed: int, choice: int, vocab_size: int) -> int:
    """Next token of the made-up model, which never ends a sequence."""
    digest = zlib.crc32(array("Q", [*list(token_ids)[-8:], seed % 2**63, choice]).tobytes())
    return NUM_SPECIAL + digest % (vocab_size - NUM_SPECIAL)


def prompt_positions(body: pb.OpenSession, start: int, stop: int) -> list[pb.PositionLogprobs]:
    """The made-up model's log-probabilities of a prompt's tokens from `start` to `stop`."""
    return [
        pb.PositionLogprobs(
            logprob=-float(position),
            top=[pb.TokenLogprob(token_id=i, logprob=-float(i)) for i in range(body.num_prompt_logprobs)],
        )
        for position in range(start, stop)
    ]
