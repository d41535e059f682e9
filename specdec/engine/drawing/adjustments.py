"""Bias, penalties, min_tokens and allowed tokens on the device: uploaded once for all draws of a captured graph.

Bad words are not supported: the tokens that they forbid depend on earlier tokens, and on whether others remain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from specdec.engine.batch import to_device
from specdec.engine.cuda.launch import launch
from specdec.engine.sampling.logit_processors import RowContext
from specdec.wire.sampling_params import SamplingParams

_BLOCK = 1024
_ALWAYS = np.iinfo(np.int32).max
Array = npt.NDArray[Any]
LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _saturated(x, values):
    """Adjusted logits ``x``, clamped to finite numbers where the original ``values`` were finite."""
    bounded = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    return tl.where(tl.abs(values) < float("inf"), bounded, values)


@triton.jit(do_not_specialize=["number"])
def adjust_kernel(
    logits, penalties, counts, held, biases, adjusted, row_stride, number, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """Logits adjusted at draw ``number``; grid (rows, chunks). ``penalties`` [R, 3]: repetition, presence, frequency.

    By row and token: ``counts``, 1 and the number in the output for a token of the prompt or the output, else 0;
    ``held``, the number of draws for which it is held back; ``biases``.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    is_id, at = ids < VOCAB, row * VOCAB + ids
    x = tl.load(logits + row * row_stride + ids, mask=is_id, other=0.0)
    bias = tl.load(biases + at, mask=is_id, other=0.0)
    x = tl.where(bias != 0.0, _saturated(x + bias, x), x)
    count = tl.load(counts + at, mask=is_id, other=0)
    repetition = tl.zeros_like(x) + tl.load(penalties + row * 3)
    penalized = tl.where(x < 0, x * repetition, tl.div_rn(x, repetition))
    penalized = penalized - tl.load(penalties + row * 3 + 1) * tl.where(count > 1, 1.0, 0.0)
    penalized = penalized - tl.load(penalties + row * 3 + 2) * (count - 1).to(tl.float32)
    x = tl.where(count > 0, _saturated(penalized, x), x)
    is_out = tl.load(held + at, mask=is_id, other=0) > number
    x = tl.where(is_out & (x < float("inf")), float("-inf"), x)
    tl.store(adjusted + row * VOCAB + ids, x, mask=is_id)


def can_adjust(params: SamplingParams) -> bool:
    """Whether all adjustments of these parameters can be made on the device."""
    return not params.bad_words


class Adjustments:
    """Adjustments of rows' logits, in tensors with fixed addresses.

    Guarantee: logits are those of ``adjusted_logits``, bit for bit, for the rows' tokens at `fill` and those counted
    since. No operation waits for data.

    Memory: twelve bytes for each row and token of the vocabulary.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Begin with rows without adjustments."""
        self._vocab_size = vocab_size
        self._penalties = torch.ones(num_rows, 3, device=device)
        self._counts, self._held = torch.zeros(2, num_rows, vocab_size, dtype=torch.int32, device=device).unbind(0)
        self._biases = torch.zeros(num_rows, vocab_size, device=device)
        self._firsts = torch.arange(0, num_rows * vocab_size, vocab_size, device=device)

    def __len__(self) -> int:
        return len(self._penalties)

    def fill(self, contexts: Sequence[RowContext]) -> None:
        """Set the first rows' adjustments at their positions; the other rows get none.

        Cost: a copy to the device of 12 bytes for each token that a row's parameters or history name, and passes over
        all rows and tokens.

        Raises:
            ValueError: a row with penalties has no history, or one whose length contradicts its position.
        """
        penalties = np.tile(np.array([1.0, 0.0, 0.0], np.float32), (len(self), 1))
        targets = (self._counts, self._held, self._biases)
        named: list[list[tuple[int, Array, Array]]] = [[], [], []]
        for target in targets:
            target.zero_()
        for index, context in enumerate(contexts):
            params = context.params
            if params.has_penalties:
                penalties[index] = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
                if context.history is None or len(context.history) + len(context.extra_tokens) != context.position:
                    raise ValueError(f"penalties at position {context.position} need the history of all tokens before")
                counts = context.history.counts(context.extra_tokens)
                named[0].append((index, counts.token_ids, np.where(counts.seen, counts.num_output + 1, 0)))
            held_ids = np.frombuffer(params.min_tokens_ids, np.int64)
            num_held = max(0, params.min_tokens - (context.position - context.num_prompt_tokens))
            if params.allowed_ids:
                self._held[index].fill_(_ALWAYS)
                allowed_ids = np.frombuffer(params.allowed_ids, np.int64)
                named[1].append((index, allowed_ids, np.isin(allowed_ids, held_ids) * num_held))
            else:
                named[1].append((index, held_ids, np.full(len(held_ids), num_held)))
            biases = np.frombuffer(params.bias_values, np.float32)
            named[2].append((index, np.frombuffer(params.bias_token_ids, np.int64), biases))
        placed = [self._placed(each) for each in named]
        places, values = to_device(
            [each for each, _ in placed],
            [*(each.view(np.int32) for _, each in placed), penalties.reshape(-1).view(np.int32)],
            self._penalties.device,
        )
        for target, at, value in zip(targets, places, values, strict=False):
            target.view(-1).index_copy_(0, at, value.view(target.dtype))
        self._penalties.copy_(values[3].view(torch.float32).view(-1, 3))

    def _placed(self, named: Sequence[tuple[int, Array, Array]]) -> tuple[Array, Array]:
        """Places of rows' tokens among all rows' tokens, and their values; ids outside the vocabulary are left out."""
        ids = np.concatenate([np.empty(0, np.int64), *(each for _, each, _ in named)])
        values = np.concatenate([np.empty(0, np.int32), *(each for _, _, each in named)])
        rows = np.repeat(np.array([index for index, *_ in named], np.int64), [len(each) for _, each, _ in named])
        is_there = (ids >= 0) & (ids < self._vocab_size)
        kind = np.float32 if values.dtype.kind == "f" else np.int32
        return (rows * self._vocab_size + ids)[is_there], values[is_there].astype(kind)

    def count(self, token_ids: torch.Tensor) -> None:
        """Count a drawn token ``[rows]`` int64 of each of the first rows as output. Five small operations."""
        counts, places = self._counts.view(-1), self._firsts[: len(token_ids)] + token_ids
        counts.index_copy_(0, places, counts.index_select(0, places).clamp_(min=1).add_(1))

    def adjusted(self, logits: torch.Tensor, number: int) -> torch.Tensor:
        """Adjusted copy of the first R rows' logits ``[R, V]`` float32 for draw ``number``, from 0 on. One launch."""
        num_rows, vocab_size = logits.shape
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        adjusted = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits.device)
        launch(
            adjust_kernel,
            (num_rows, -(-vocab_size // _BLOCK)),
            logits=logits,
            penalties=self._penalties,
            counts=self._counts,
            held=self._held,
            biases=self._biases,
            adjusted=adjusted,
            row_stride=logits.stride(0),
            number=number,
            VOCAB=vocab_size,
            BLOCK=_BLOCK,
            options={"num_warps": 4, "enable_fp_fusion": False},
        )
        return adjusted
