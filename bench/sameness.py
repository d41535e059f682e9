"""Checks that an inflated model has the greedy output of its source, and how much of it a draft would guess.

The source decodes greedily. Then both models compute its text in one forward pass each. Where the larger model's best
token is the source's next token at every position, its greedy output is the same text, by induction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

NEAR_TIES = {torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.25}
"""Difference of two tokens' logits below which another order of sums may exchange them, by dtype."""


class TokensNotSame(AssertionError):
    """An inflated model's greedy output differs from its source's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sameness:
    """Result of a comparison."""

    dtype: str
    num_tokens: int
    num_equal: int
    num_near_ties: int
    """Unequal tokens at positions where the source's two best logits are a near-tie."""
    largest_logit_difference: float

    @property
    def holds(self) -> bool:
        """Whether every token is equal or a near-tie."""
        return self.num_equal + self.num_near_ties == self.num_tokens

    def as_facts(self) -> dict[str, object]:
        """The result as JSON values."""
        return dataclasses.asdict(self)


def check_sameness(
    source: Path,
    inflated: Path,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int = 64,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Sameness:
    """Compare greedy tokens and logits over the first `num_tokens` tokens after each prompt.

    Raises TokensNotSame where a token differs that is no near-tie.
    """
    disable_progress_bar()
    small = _load(source, device, dtype)
    large = _load(inflated, device, dtype)
    equal = near = 0
    largest = 0.0
    with torch.inference_mode():
        for prompt in prompts:
            text = _decode(small, prompt, num_tokens, device)
            rows = slice(len(prompt) - 1, len(prompt) - 1 + num_tokens)
            ours, theirs = _logits(small, text, rows), _logits(large, text, rows)
            theirs = theirs[:, : ours.shape[1]]
            best_two = ours.topk(2, dim=1).values
            is_equal = ours.argmax(dim=1) == theirs.argmax(dim=1)
            is_close = (best_two[:, 0] - best_two[:, 1]) < NEAR_TIES[dtype]
            equal += int(is_equal.sum())
            near += int((~is_equal & is_close).sum())
            largest = max(largest, float((ours - theirs).abs().max()))
    found = Sameness(
        dtype=str(dtype).removeprefix("torch."),
        num_tokens=num_tokens * len(prompts),
        num_equal=equal,
        num_near_ties=near,
        largest_logit_difference=largest,
    )
    if not found.holds:
        raise TokensNotSame(f"{inflated.name} differs from its source: {found}")
    return found


def agreement(
    target: Path, drafts: Sequence[Path], prompts: Sequence[Sequence[int]], num_tokens: int = 32
) -> list[float]:
    """For each draft, the share of the target's greedy tokens that are its best ones too, given all tokens before."""
    disable_progress_bar()
    with torch.inference_mode():
        ours = _load(target, "cpu", torch.float32)
        texts = [_decode(ours, prompt, num_tokens, "cpu") for prompt in prompts]
        return [_share_guessed(_load(draft, "cpu", torch.float32), texts, num_tokens) for draft in drafts]


def _share_guessed(draft: Any, texts: Sequence[torch.Tensor], num_tokens: int) -> float:
    num_equal = 0
    for text in texts:
        start = text.shape[1] - num_tokens
        guesses = _logits(draft, text, slice(start - 1, start - 1 + num_tokens)).argmax(dim=1)
        num_equal += int((guesses == text[0, start:]).sum())
    return num_equal / (num_tokens * len(texts))


def _load(folder: Path, device: str, dtype: torch.dtype) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, attn_implementation="eager")
    return model.to(device).eval().requires_grad_(False)


def _decode(model: Any, prompt: Sequence[int], num_tokens: int, device: str) -> torch.Tensor:
    """The prompt and its greedy continuation, [1, T]."""
    text = torch.tensor([list(prompt)], device=device)
    output = model(input_ids=text, use_cache=True)
    for _ in range(num_tokens - 1):
        token = output.logits[:, -1:].argmax(dim=-1)
        text = torch.cat([text, token], dim=1)
        output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
    return torch.cat([text, output.logits[:, -1:].argmax(dim=-1)], dim=1)


def _logits(model: Any, text: torch.Tensor, rows: slice) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=text, use_cache=False).logits[0, rows].float()
    return logits
