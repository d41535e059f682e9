"""Token streams and the windows cut from them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from .corpus import SourceFile

Tokens = NDArray[np.uint16]


def encode_files(tokenizer: PreTrainedTokenizerFast, files: list[SourceFile]) -> list[Tokens]:
    """Return each file as bos, its tokens, eos."""
    encodings = tokenizer.backend_tokenizer.encode_batch([file.text for file in files])
    return [np.array([*encoding.ids, tokenizer.eos_token_id], dtype=np.uint16) for encoding in encodings]


def windows(documents: list[Tokens], num_sequences: int, length: int, seed: int) -> Iterator[Tensor]:
    """Yield (num_sequences, length + 1) batches for ever.

    Each epoch joins the documents in a new order, starts at a new offset, and visits the
    windows in a new order, so no two epochs show the same cuts.
    """
    generator = np.random.default_rng(seed)
    while True:
        order = generator.permutation(len(documents))
        stream = np.concatenate([documents[i] for i in order])[generator.integers(length) :]
        starts = generator.permutation(np.arange(0, len(stream) - length - 1, length))
        for first in range(0, len(starts) - num_sequences + 1, num_sequences):
            chosen = starts[first : first + num_sequences]
            rows = np.stack([stream[start : start + length + 1] for start in chosen])
            yield torch.from_numpy(rows.astype(np.int64))
