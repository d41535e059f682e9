"""DSpark (arXiv:2607.05147): DFlash's block, with logits that depend on the previous token, and a confidence.

    m = markov_w1[token before];  logits_k += markov_w2 m     (gated: m times a gate; rnn: of a state over the block)
    confidence_k = sigmoid(w . concat(y_k, m) + b)            of the slot's token, if those before it were taken

So the choices of a depth depend on the path above, for one small product per node.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from specdec.drafting.heads.checkpoint import HeadFiles, HeadRefused, fill
from specdec.drafting.heads.config import HeadConfig
from specdec.drafting.heads.drawing import Choices, after, choose
from specdec.drafting.heads.growth import GrowingTree
from specdec.drafting.heads.methods.dflash import DFlash
from specdec.drafting.heads.session import HeadAsk
from specdec.drafting.heads.target import HeadTarget
from specdec.drafting.interface import Capabilities, Offer

CAPABILITIES = Capabilities(needs_hidden_states=True)
PREFIXES = ("markov_head.", "confidence_head.")
_FIRST_RANK = 256


class MarkovHead(nn.Module):
    """The bias that the previous token adds to a slot's logits."""

    def __init__(self, kind: str, vocab_size: int, draft_size: int, rank: int, size: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_size, bias=False)
        self.gate_proj = nn.Linear(size + rank, rank) if kind == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + size, 3 * rank) if kind == "rnn" else None

    def forward(
        self, before: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a bias [T, D] and new states, from token embeddings [T, rank], hidden states [T, H] and states [T,
        rank].
        """
        if self.gate_proj is not None:
            before = before * torch.sigmoid(self.gate_proj(torch.cat([hidden, before], dim=-1)))
        elif self.joint_proj is not None:
            gate, new, out = self.joint_proj(torch.cat([state, before, hidden], dim=-1)).chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1.0 - gate) * torch.tanh(new)
            before = torch.tanh(out)
        return self.markov_w2(before), state


class ConfidenceHead(nn.Module):
    """The probability that a slot's token is accepted."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """[T, size] to [T], from 0 to 1."""
        return torch.sigmoid(self.proj(features).squeeze(-1))


class SparkModel(nn.Module):
    """The modules besides DFlash's, named as in the checkpoint."""

    def __init__(self, config: HeadConfig, vocab_size: int, draft_size: int) -> None:
        super().__init__()
        kind, rank = (
            str(config.values.get("markov_head_type", "vanilla")),
            config.values.get("markov_rank", _FIRST_RANK),
        )
        if kind not in ("vanilla", "gated", "rnn"):
            raise HeadRefused(f"config.json: markov_head_type {kind} is not one of vanilla, gated, rnn")
        if not isinstance(rank, int) or rank < 0:
            raise HeadRefused(f"config.json: markov_rank is {rank!r}, not an integer of 0 or more")
        size = config.layers.hidden_size
        self.rank = rank
        self.markov_head = MarkovHead(kind, vocab_size, draft_size, rank, size) if rank else None
        self.reads_token = config.flag("confidence_head_with_markov", default=True)
        has_confidence = config.flag("enable_confidence_head", default=True)
        self.confidence_head = ConfidenceHead(size + rank * self.reads_token) if has_confidence else None

    def bias(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor | float, torch.Tensor | None, torch.Tensor]:
        """After tokens [T]: the logits' bias [T, D] or 0.0, confidence [T] or None, and new states."""
        before = hidden.new_zeros(len(token_ids), 0)
        added: torch.Tensor | float = 0.0
        if self.markov_head is not None:
            before = self.markov_head.markov_w1(token_ids)
            added, state = self.markov_head(before, hidden, state)
        if self.confidence_head is None:
            return added, None, state
        features = torch.cat([hidden, before], dim=-1) if self.reads_token else hidden
        return added, self.confidence_head(features), state


class DSpark(DFlash):
    """DFlash's pass, followed by a tree that grows level by level."""

    spark: SparkModel

    def drawn(self, asks: Sequence[HeadAsk], hidden: torch.Tensor, anchors: torch.Tensor) -> list[Offer | None]:
        """See `DFlash.drawn`."""
        base = self.model.lm_head(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        trees = [GrowingTree(ask.room, 1 if ask.is_chain else self.top_k) for ask in asks]
        start = hidden.new_zeros(self.spark.rank)
        states: list[dict[int, torch.Tensor]] = [{} for _ in asks]
        tokens = anchors.tolist()
        for depth in range(hidden.shape[1]):
            growing = [i for i, tree in enumerate(trees) if tree.grows]
            places = [(i, node) for i in growing for node in trees[i].beam]
            if not places:
                break
            lines = [i for i, _ in places]
            before = [tokens[i] if node < 0 else trees[i].nodes[node].token_id for i, node in places]
            above = [start if node < 0 else states[i][trees[i].nodes[node].parent] for i, node in places]
            added, confidence, state = self.spark.bias(
                torch.tensor(before, device=hidden.device), hidden[lines, depth], torch.stack(above)
            )
            logits = self.vocabulary.spread(base[lines, depth] + added)
            rows = [after(asks[i].row, trees[i].path(node)) for i, node in places]
            choices = choose(self.target.sampler, logits, rows, self.top_k)
            if confidence is not None:
                choices = [_sure(found, share) for found, share in zip(choices, confidence.tolist(), strict=True)]
            for (i, node), each in zip(places, state, strict=True):
                states[i][node] = each
            found = iter(choices)
            for i in growing:
                trees[i].add_level([next(found) for _ in trees[i].beam])
        return [tree.offer() for tree in trees]


def _sure(choices: Choices, confidence: float) -> Choices:
    """Give the first choice the head's confidence; the others share the rest."""
    if not choices:
        return choices
    rest = sum(share for _, share in choices[1:]) or 1.0
    others = [(token, (1.0 - confidence) * share / rest) for token, share in choices[1:]]
    return [(choices[0][0], confidence), *others]


def load_spark(files: HeadFiles, config: HeadConfig, draft_size: int, target: HeadTarget) -> SparkModel:
    """Load the modules besides DFlash's. Raises HeadRefused."""
    tensors = {name.removeprefix("model."): value for name, value in files.tensors.items()}
    model = SparkModel(config, target.vocab_size, draft_size)
    fill(model, {name: value for name, value in tensors.items() if name.startswith(PREFIXES)})
    target.place(model)
    return model
