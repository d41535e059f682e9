"""Bias, penalties, min_tokens and allowed tokens on the device: uploaded once for all draws of a captured graph.

Bad words are not supported: the tokens that they forbid depend on earlier tokens, and on whether others remain.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from specdec.engine.cuda.adjust_kernels import (
    ADJUST_WORDS,
    ALLOWED,
    BIASED,
    HELD,
    ONCE,
    SEEN,
    adjust_kernel,
    count_kernel,
    mark_kernel,
)
from specdec.engine.cuda.launch import launch
from specdec.engine.sampling.logit_processors import RowContext
from specdec.wire.sampling_params import SamplingParams

_NUM_WORDS = int(ADJUST_WORDS.value)
_BLOCK, _ENTRIES_BLOCK = 1024, 256
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}

Ids = npt.NDArray[np.int64]


def can_adjust(params: SamplingParams) -> bool:
    """Whether all adjustments of these parameters can be made on the device."""
    return not params.bad_words


class Adjustments:
    """Adjustments of rows' logits, in tensors with fixed addresses.

    Guarantee: logits are those of ``adjusted_logits``, bit for bit, for the rows' tokens at `fill` and those counted
    since. No operation waits for data.

    Memory: eight bytes for each row and token of the vocabulary.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Begin with rows without adjustments."""
        self._vocab_size = vocab_size
        self._rows = torch.zeros(num_rows, _NUM_WORDS, dtype=torch.int32, device=device)
        self._marks = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device)
        self._biases = torch.zeros(num_rows, vocab_size, dtype=torch.float32, device=device)

    def __len__(self) -> int:
        return len(self._rows)

    def fill(self, contexts: Sequence[RowContext]) -> None:
        """Set the first rows' adjustments at their positions; the other rows get none.

        Cost: two copies to the device, one of them of 12 bytes for each token that a row's parameters or history name,
        and a pass over the marks.

        Raises:
            ValueError: a row with penalties has no history, or one whose length contradicts its position.
        """
        words = np.zeros((len(self._rows), _NUM_WORDS), np.int32)
        parts: list[tuple[int, Ids, Ids, npt.NDArray[np.float32]]] = []
        for index, context in enumerate(contexts):
            params = context.params
            penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            words[index, :3] = np.array(penalties, np.float32).view(np.int32)
            words[index, 3] = params.has_penalties
            words[index, 4] = max(0, params.min_tokens - (context.position - context.num_prompt_tokens))
            words[index, 5] = bool(params.allowed_ids)
            parts += [(index, *part) for part in _parts(context) if len(part[0])]
        self._rows.copy_(torch.from_numpy(words), non_blocking=True)
        self._marks.zero_()
        entries = self._entries(parts)
        if entries.shape[1]:
            launch(
                mark_kernel,
                (-(-entries.shape[1] // _ENTRIES_BLOCK),),
                entries.to(self._marks.device, non_blocking=True),
                self._marks,
                self._biases,
                entries.shape[1],
                BLOCK=_ENTRIES_BLOCK,
                options={"num_warps": 4},
            )

    def count(self, drawn: torch.Tensor) -> None:
        """Count the rows' drawn tokens ``[rows, 2, num_top]`` int32, as ``launch_top`` returns them. One launch."""
        launch(
            count_kernel,
            (drawn.shape[0],),
            drawn,
            self._marks,
            drawn.shape[2],
            VOCAB=self._vocab_size,
            options={"num_warps": 1},
        )

    def adjusted(self, logits: torch.Tensor, number: int) -> torch.Tensor:
        """Adjusted copy of the first R rows' logits ``[R, V]`` float32 for draw ``number``, from 0 on. One launch."""
        num_rows, vocab_size = logits.shape
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        adjusted = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits.device)
        launch(
            adjust_kernel,
            (num_rows, -(-vocab_size // _BLOCK)),
            logits,
            self._rows,
            self._marks,
            self._biases,
            adjusted,
            logits.stride(0),
            number,
            VOCAB=vocab_size,
            BLOCK=_BLOCK,
            options=_OPTIONS,
        )
        return adjusted

    def _entries(self, parts: Sequence[tuple[int, Ids, Ids, npt.NDArray[np.float32]]]) -> torch.Tensor:
        """Entries ``[3, N]`` int32 for ``mark_kernel``. Ids outside the vocabulary are left out."""
        if not parts:
            return torch.empty(3, 0, dtype=torch.int32)
        row = np.repeat([index for index, *_ in parts], [len(ids) for _, ids, _, _ in parts])
        ids, marks, biases = (np.concatenate([part[i] for part in parts]) for i in (1, 2, 3))
        is_there = (ids >= 0) & (ids < self._vocab_size)
        entries = np.empty((3, int(is_there.sum())), np.int32)
        entries[0] = (row * self._vocab_size + ids)[is_there]
        entries[1] = marks[is_there]
        entries[2] = biases.astype(np.float32)[is_there].view(np.int32)
        return torch.from_numpy(entries)


def _parts(context: RowContext) -> list[tuple[Ids, Ids, npt.NDArray[np.float32]]]:
    """Token ids with their marks and biases, for each adjustment of a row."""
    params = context.params
    found: list[tuple[Ids, Ids, npt.NDArray[np.float32]]] = []

    def marked(token_ids: Ids, mark: int) -> None:
        found.append((token_ids, np.full(len(token_ids), mark), np.zeros(len(token_ids), np.float32)))

    if params.has_penalties:
        if context.history is None or len(context.history) + len(context.extra_tokens) != context.position:
            raise ValueError(f"penalties at position {context.position} need the history of all tokens before it")
        counts = context.history.counts(context.extra_tokens)
        marks = counts.num_output * ONCE.value + counts.seen * SEEN.value
        found.append((counts.token_ids, marks, np.zeros(len(marks), np.float32)))
    if params.min_tokens_ids:
        marked(np.frombuffer(params.min_tokens_ids, np.int64), HELD.value)
    if params.allowed_ids:
        marked(np.frombuffer(params.allowed_ids, np.int64), ALLOWED.value)
    if params.bias_token_ids:
        ids = np.frombuffer(params.bias_token_ids, np.int64)
        found.append((ids, np.full(len(ids), BIASED.value), np.frombuffer(params.bias_values, np.float32)))
    return found
