"""Ways to compute a sequence, and transformers' own logits for it."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from specdec.engine.model.runner import ModelRunner
from tests.support.engine import paged_scenarios as play
from tests.support.engine.tiny_models import VOCAB_SIZE

TOKENS = play.random_tokens(45, 1, VOCAB_SIZE)
OTHER = play.random_tokens(45, 2, VOCAB_SIZE)
WRONG = play.random_tokens(9, 3, VOCAB_SIZE)
PROMPT = 21  # amid a block: 45 tokens are 5 blocks of 8 and a part, longer than the tiny sliding windows

SCENARIOS: dict[str, Callable[[ModelRunner], play.Log]] = {
    "whole prefill": lambda runner: play.play_alone(runner, TOKENS),
    "chunked prefill": lambda runner: play.play_alone(runner, TOKENS, max_batch_tokens=7),
    "batching": lambda runner: play.play_in_batch(runner, TOKENS, [OTHER, WRONG, OTHER[:17]]),
    "decoding": lambda runner: play.play_decodes(runner, TOKENS, PROMPT),
    "trees": lambda runner: play.play_trees(runner, TOKENS, PROMPT, WRONG),
    "rollback": lambda runner: play.play_rollback(runner, TOKENS, PROMPT, WRONG),
    "fork": lambda runner: play.play_fork(runner, TOKENS, PROMPT, WRONG),
    "cache hit": lambda runner: play.play_cache_hit(runner, TOKENS),
    "preemption": lambda runner: play.play_preemption(runner, TOKENS, PROMPT, OTHER[:20]),
}


class Reference:
    """transformers' own logits: one dense forward pass per sequence of tokens."""

    def __init__(self, directory: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self._known: dict[play.Path, torch.Tensor] = {}

    @torch.inference_mode()
    def last_row(self, path: play.Path) -> torch.Tensor:
        """Logits after the last token of a path."""
        if path not in self._known:
            rows = self._model(input_ids=torch.tensor([path]), use_cache=False).logits[0].float()
            self._known.update({path[: i + 1]: row for i, row in enumerate(rows)})
        return self._known[path]

    @property
    def spread(self) -> float:
        """Standard deviation of all logits that were computed."""
        return float(torch.stack(list(self._known.values())).std())

    def largest_error(self, log: play.Log) -> float:
        """Largest difference over all logged rows."""
        return float(self.errors(log).abs().max())

    def errors(self, log: play.Log) -> torch.Tensor:
        """Differences of all logged rows; long paths first, as their forward pass covers the short ones."""
        paths = sorted(log, key=len, reverse=True)
        return torch.stack([row - self.last_row(path) for path in paths for row in log[path]])
