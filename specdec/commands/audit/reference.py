"""The reference of an audit: the model in transformers, one plain forward pass at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from specdec.engine.checkpoints.files import read_eos_token_ids, read_tokenizer
from specdec.engine.checkpoints.rounding import WeightQuantization, quantize_linear_weights
from specdec.engine.checkpoints.wrappers import own_class

_MOST_ROWS = 64
"""Sequences of one forward pass."""


class Reference:
    """A checkpoint in float32 on the CPU, with eager attention and without the engine."""

    def __init__(self, folder: Path, *, dtype: str = "float32", quantization: WeightQuantization = "none") -> None:
        """Load the checkpoint.

        Args:
            folder: the checkpoint's, in transformers' format.
            dtype: the service's; weights are rounded to it, and products computed in float32.
            quantization: the service's rounding of weights.

        Raises what transformers raises for a folder that it cannot load.
        """
        disable_progress_bar()
        kind: Any = own_class(AutoConfig.from_pretrained(str(folder))) or AutoModelForCausalLM
        model: Any = kind.from_pretrained(str(folder), dtype=getattr(torch, dtype), attn_implementation="eager")
        self._model = model.to(torch.float32).eval().requires_grad_(False)
        quantize_linear_weights(self._model, quantization)
        tokenizer = read_tokenizer(folder)
        self.tokenizer_digest = tokenizer.digest
        self.tokenizer: Tokenizer | None = Tokenizer.from_str(tokenizer.tokenizer_json) if tokenizer.digest else None
        num_logits = int(model.get_output_embeddings().weight.shape[0])
        self.vocab_size = min(num_logits, tokenizer.vocab_size or num_logits)
        named_eos = getattr(model.config, "eos_token_id", None)
        self.eos_token_ids = read_eos_token_ids(folder, named_eos, tokenizer, self.vocab_size)

    def logits(self, prompt: Sequence[int], outputs: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The logits from which each token of a prompt's outputs is chosen, [N, vocab_size] float32 per output."""
        return [rows for some in self.batches(prompt, outputs) for rows in some]

    @torch.inference_mode()
    def batches(self, prompt: Sequence[int], outputs: Sequence[Sequence[int]]) -> Iterator[list[torch.Tensor]]:
        """`logits` in order, one list per forward pass, so that the caller may do something else in between."""
        of_prompt = self._model(torch.tensor([list(prompt)]), use_cache=True, logits_to_keep=1)
        for first in range(0, len(outputs), _MOST_ROWS):
            some = outputs[first : first + _MOST_ROWS]
            rows = of_prompt.logits.expand(len(some), -1, -1)
            num_more = max(map(len, some)) - 1
            if num_more > 0:
                cache = copy.deepcopy(of_prompt.past_key_values)
                cache.batch_repeat_interleave(len(some))
                # Padding after a row's end does not change earlier positions.
                tokens = torch.tensor([[*output[:num_more], *[0] * (num_more - len(output))] for output in some])
                further = self._model(tokens, past_key_values=cache, use_cache=True)
                rows = torch.cat([rows, further.logits], dim=1)
            own = rows[:, :, : self.vocab_size].float()
            yield [own[row, : len(output)] for row, output in enumerate(some)]
