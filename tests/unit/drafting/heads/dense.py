"""Heads computed over whole texts, row by row of the formulas: no cache, no batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specdec.drafting.heads.methods.dflash import DFlash
from specdec.drafting.heads.methods.dspark import DSpark
from specdec.drafting.heads.methods.peagle import PEagle
from specdec.drafting.heads.parts import Attend, dense_attention
from specdec.drafting.heads.serial import SerialModel


def causal(num_rows: int) -> torch.Tensor:
    return torch.ones(num_rows, num_rows).tril().bool()


def chain_logits(
    model: SerialModel, taps: torch.Tensor, next_ids: Sequence[int], attention: Callable[[torch.Tensor], Attend]
) -> torch.Tensor:
    """Logits [D] after the last of these tokens: those past `taps` [n, layers, Ht] go on from the head's own states."""
    states = model.fuse(taps)
    while True:
        count = len(states)
        ids = torch.tensor(next_ids[:count])
        hidden = model.run(states, ids, torch.arange(count), attention(causal(count)))
        if count == len(next_ids):
            return model.logits(hidden[-1:])[0]
        states = torch.cat([states, model.carry(hidden[-1:])])


def rollout_logits(head: PEagle, taps: torch.Tensor, next_ids: Sequence[int], num_masks: int) -> torch.Tensor:
    """Logits [D] of the mask that many places after the last token."""
    masks = head._mask_state.expand(num_masks, -1)
    states = torch.cat([head.model.fuse(taps), masks])
    ids = torch.tensor([*next_ids, *[head._mask_token_id] * num_masks])
    hidden = head.model.run(states, ids, torch.arange(len(ids)), dense_attention(causal(len(ids))))
    return head.model.logits(hidden[-1:])[0]


def block_states(head: DFlash, taps: torch.Tensor, anchor: int) -> torch.Tensor:
    """Normed hidden states [block, H] of a block after a text."""
    context = head.model.context(taps)
    num_context, num_rows = len(context), head._block
    every = num_context + num_rows
    visible = torch.zeros(every, every, dtype=torch.bool)
    visible[num_context:] = True
    visible[:num_context, :num_context] = torch.eye(num_context).bool()

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = head.model.entries(layer, context, torch.arange(num_context))
        padded = torch.cat([query.new_zeros(num_context, *query.shape[1:]), query])
        both = torch.cat([keys, key]), torch.cat([values, value])
        return dense_attention(visible)(layer, padded, *both)[num_context:]

    embedded = head._mask.expand(num_rows, -1).clone()
    embedded[0] = head.model.embed_tokens(torch.tensor(anchor))
    return head.model.run(embedded, torch.arange(num_context, every), attend)


def block_logits(head: DFlash, taps: torch.Tensor, anchor: int) -> torch.Tensor:
    """Logits [block, D]."""
    logits: torch.Tensor = head.model.lm_head(block_states(head, taps, anchor))
    return logits


def spark_logits(head: DSpark, taps: torch.Tensor, anchor: int, path: Sequence[int]) -> torch.Tensor:
    """Logits [D] of the slot after these tokens."""
    hidden = block_states(head, taps, anchor)
    state = hidden.new_zeros(1, head.spark.rank)
    added: torch.Tensor | float = 0.0
    for slot, token in enumerate([anchor, *path]):
        added, _, state = head.spark.bias(torch.tensor([token]), hidden[slot : slot + 1], state)
    logits: torch.Tensor = head.model.lm_head(hidden[len(path)]) + added
    return logits[0]
