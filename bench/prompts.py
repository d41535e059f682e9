"""Held-out prompts as token ids, whole or of a given length."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from tokenizers import Tokenizer

from bench.chats import chats, speaks_chats, templated

_NUM_CHATS = 32
_PROMPTS = Path(__file__).parents[1] / "models" / "prompts.json"
Prompt = tuple[int, ...]


def held_out_prompts(model: Path, count: int) -> list[Prompt]:
    """The first held-out prompts in a model's tokens, repeated when there are fewer.

    They are those of models/prompts.json; for a chat model chats of all kinds (`bench/chats.py`).
    """
    return list(itertools.islice(itertools.cycle(_encoded(model)), count))


def prompts_of_length(model: Path, count: int, num_tokens: int) -> list[Prompt]:
    """Prompts of exactly `num_tokens` tokens: concatenated texts, beginning with another one each time."""
    texts = _encoded(model)
    start = texts[0][:1]
    found = []
    for first in range(count):
        # Only the first text keeps its beginning-of-sequence token.
        joined = itertools.chain(start, *(texts[(first + n) % len(texts)][1:] for n in range(num_tokens)))
        found.append(tuple(itertools.islice(joined, num_tokens)))
    return found


def _encoded(model: Path) -> list[Prompt]:
    if speaks_chats(model):
        return [ids for _, ids in templated(model, chats(_NUM_CHATS, held_out=True))]
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return [tuple(tokenizer.encode(entry["text"]).ids) for entry in json.loads(_PROMPTS.read_text())]
