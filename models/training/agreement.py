"""How often the draft says what the target says: the figures of models/README.md.

Everything runs on the bfloat16 weights as saved, computed in float32, as a CPU serves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from .tokenizer import BOS_ID, EOS_ID

CHAIN = 8  # drafted tokens per position that are followed


@dataclass
class TextFigures:
    """Teacher-forced over text: means per token."""

    tokens: int = 0
    target_nats: float = 0.0
    draft_nats: float = 0.0
    greedy_agreement: float = 0.0
    overlap: float = 0.0

    def add(self, target: Tensor, draft: Tensor, labels: Tensor) -> None:
        """Add log-probabilities of (tokens, vocabulary) against the tokens that came next."""
        n = len(labels)
        self.tokens += n
        self.target_nats += functional.nll_loss(target, labels, reduction="sum").item()
        self.draft_nats += functional.nll_loss(draft, labels, reduction="sum").item()
        self.greedy_agreement += (target.argmax(-1) == draft.argmax(-1)).sum().item()
        self.overlap += torch.minimum(target.exp(), draft.exp()).sum().item()

    def means(self) -> dict[str, float]:
        """Return the figures divided by the tokens seen."""
        sums = (("target_nats", self.target_nats), ("draft_nats", self.draft_nats))
        rates = (("greedy_agreement", self.greedy_agreement), ("overlap", self.overlap))
        return {"tokens": self.tokens} | {name: round(value / self.tokens, 4) for name, value in sums + rates}


@dataclass
class ChainFigures:
    """Chains drafted greedily along the target's own continuation, from every position of it."""

    chains: int = 0
    unbroken: list[int] = field(default_factory=lambda: [0] * CHAIN)

    def means(self) -> dict[str, object]:
        """Return, by position in the chain, agreement given that all before agreed, and of all so far."""
        reached = [self.chains, *self.unbroken[:-1]]
        prefix = [count / self.chains for count in self.unbroken]
        return {
            "chains": self.chains,
            "agreement_given_prefix": [round(a / max(1, b), 4) for a, b in zip(self.unbroken, reached, strict=True)],
            "prefix_agreement": [round(rate, 4) for rate in prefix],
            "accepted_of_4": round(sum(prefix[:4]), 3),
            "accepted_of_8": round(sum(prefix[:8]), 3),
        }


def _log_probabilities(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, use_cache=False).logits.float().log_softmax(-1)


@torch.inference_mode()
def over_text(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, documents: Sequence[Sequence[int]], length: int
) -> TextFigures:
    """Score whole held-out documents (ids from bos to eos) in windows of ``length`` tokens.

    A window starts afresh with bos; no context is carried over from the window before.
    """
    figures = TextFigures()
    for document in documents:
        for start in range(1, len(document), length - 1):
            tokens = torch.tensor([[BOS_ID, *document[start : start + length - 1]]])
            inputs, labels = tokens[:, :-1], tokens[0, 1:]
            if len(labels):
                target_log, draft_log = (_log_probabilities(m, inputs)[0] for m in (target, draft))
                figures.add(target_log, draft_log, labels)
    return figures


@torch.inference_mode()
def continue_text(
    target: LlamaForCausalLM, prompt: Sequence[int], num_new: int, temperature: float, seed: int
) -> list[int]:
    """Return the prompt and up to ``num_new`` tokens of the target's own, cut before eos."""
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    output = target(input_ids=torch.tensor([tokens]), use_cache=True)
    for _ in range(num_new):
        logits = output.logits[0, -1].float()
        if temperature == 0:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        if token == EOS_ID:
            break
        tokens.append(token)
        output = target(input_ids=torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True)
    return tokens


def repeated_share(tokens: Sequence[int], num_prompt: int, span: int = 16) -> float:
    """Return the share of a continuation's tokens that end ``span`` tokens already seen in the text.

    Small models loop under greedy decoding, and loops are easy to draft: this says how much of it.
    """
    seen: set[tuple[int, ...]] = set()
    num_repeated = 0
    for end in range(span, len(tokens) + 1):
        gram = tuple(tokens[end - span : end])
        num_repeated += end > num_prompt and gram in seen
        seen.add(gram)
    return num_repeated / max(1, len(tokens) - num_prompt)


@torch.inference_mode()
def along_continuation(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    tokens: list[int],
    num_prompt: int,
    text: TextFigures,
    chains: ChainFigures | None,
) -> None:
    """Add one continuation by the target: per-token figures, and chains if it was greedy.

    A chain is drafted greedily from every position. While it agrees, it *is* the continuation:
    so the draft's greedy tokens in one teacher-forced pass say how long every chain would hold.
    """
    sequence = torch.tensor([tokens])
    labels = sequence[0, num_prompt:]
    if not len(labels):
        return
    target_log, draft_log = (_log_probabilities(model, sequence)[0, num_prompt - 1 : -1] for model in (target, draft))
    text.add(target_log, draft_log, labels)
    if chains is None:
        return
    same = draft_log.argmax(-1) == labels
    for start in range(len(same) - CHAIN + 1):
        held = same[start : start + CHAIN].int().cumprod(0).tolist()
        chains.chains += 1
        for depth, value in enumerate(held):
            chains.unbroken[depth] += value
