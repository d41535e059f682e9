"""Plays a tiny model through the engine and compares its logits with transformers'."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.engine.block_pool import BlockPool
from specdec.engine.engine import Engine
from specdec.engine.errors import EngineError, ModelLoadError, TapRefused
from specdec.engine.model.runner import ModelRunner
from specdec.engine.scheduler import Scheduler
from specdec.engine.sequence import Sequence
from specdec.engine.settings import EngineSettings
from specdec.engine.sublayers import SkippedSublayers
from specdec.engine.tap import FINAL
from specdec.engine.tree import TokenTree
from tests.support.zoo.cases import Case
from tests.support.zoo.shrinking import CONTEXT, VOCAB_SIZE

TOLERANCE = 1e-4
"""Greatest difference of a logit, over the standard deviation of its row: float32 in another order of sums."""
_BLOCK = 8
_CHUNK = 11
_WEIGHT_STD = 0.2


@dataclass(frozen=True, slots=True)
class Played:
    """What a model does in the engine."""

    path: str
    """`fused`, or `modules` for transformers' own."""
    row_invariant: bool
    context: int
    """Tokens that the engine serves of `CONTEXT`."""
    heads: bool
    """Whether steps can return hidden states for heads."""
    layer_skip: bool
    difference: float
    """Greatest difference from transformers' logits, as `TOLERANCE`."""
    num_rows: int
    """Rows of logits that were compared."""
    num_shared_tokens: int
    """Tokens of prompts that came from the prefix cache, per seed."""


def play(case: Case, folder: Path, *, num_seeds: int = 1, **settings: Any) -> Played:
    """Save a tiny model in a folder, serve it and compare.

    Raises ModelLoadError if the engine refuses the model.
    """
    model = save_model(case, folder)
    runner = ModelRunner.load(
        EngineSettings(model=str(folder), device="cpu", num_blocks=48, block_size=_BLOCK, **settings)
    )
    game = _Game(runner, model)
    for seed in range(num_seeds):
        game.play(seed)
    return Played(
        path=runner.numerics_id.split("/")[2].partition("-")[0].replace("native", "modules"),
        row_invariant=runner.row_invariant,
        context=runner.max_model_len,
        heads=_can_tap(runner),
        layer_skip=_can_skip(runner),
        difference=game.difference,
        num_rows=game.num_rows,
        num_shared_tokens=game.num_shared // num_seeds,
    )


def refusal(case: Case, folder: Path) -> ModelLoadError | None:
    """The engine's error for a model of which there is only the configuration; None if it would read weights."""
    case.config().save_pretrained(folder)
    try:
        ModelRunner.load(EngineSettings(model=str(folder), device="cpu"))
    except ModelLoadError as error:
        return None if "safetensors" in str(error) else error
    raise AssertionError("a model without weights was loaded")


def save_model(case: Case, folder: Path) -> PreTrainedModel:
    """Write a tiny model with random weights, also of biases and norms; returns it."""
    torch.manual_seed(0)
    config = case.config()
    config._attn_implementation = "eager"
    model = case.model_class()(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * 0.1)
        elif "norm" not in name and float(parameter.std()) < _WEIGHT_STD / 4:
            parameter.normal_(0.0, _WEIGHT_STD)
    model.save_pretrained(folder)
    return model


class _Game:
    """An engine, and the model that it must agree with."""

    def __init__(self, runner: ModelRunner, model: PreTrainedModel) -> None:
        self._model = model
        pool = BlockPool(runner.num_blocks, _BLOCK)
        self._engine = Engine(
            runner, pool, Scheduler(pool, 2 * _CHUNK, 8, runner.max_model_len, runner.session_states())
        )
        self._limit = min(runner.max_model_len, CONTEXT)
        self.difference = 0.0
        self.num_rows = 0
        self.num_shared = 0  # tokens of prompts from the prefix cache

    def play(self, seed: int) -> None:
        """Prompts in chunks beside decodes and trees, accepted branches, and a prompt that hits the prefix cache."""
        generator = torch.Generator().manual_seed(seed)

        def draw(count: int) -> list[int]:
            return torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist()

        most = self._limit - 8
        prompts = [draw(min(length, most)) for length in (41, 7, 23)]
        sequences = [self._add(prompt) for prompt in prompts]
        self._run(sequences)
        for seq in sequences:
            self._engine.append(seq, draw(1))
            seq.tree = TokenTree(draw(6), [-1, -1, 0, 1, 3, 0])
        half = prompts[0][: len(prompts[0]) // 2]
        late = self._add([*half, *draw(5)])
        self._run([*sequences, late], accept=[1, 3, 4])
        for seq in sequences:
            self._engine.append(seq, draw(1))
        later = self._add([*half, *draw(5)])  # recurrent layers have a snapshot where `late` has left the first prompt
        self._run([*sequences, later])
        for seq in [*sequences, late, later]:
            self._engine.free(seq)
        self.num_shared = self._engine.stats().prefix_hit_tokens

    def _add(self, tokens: list[int]) -> Sequence:
        return self._engine.add(tokens, num_prompt_tokens=len(tokens))

    def _run(self, sequences: Ids[Sequence], accept: Ids[int] = ()) -> None:
        """Step until nothing is pending; compare each row of logits."""
        while (output := self._engine.step()) is not None:
            for item in output.items:
                rows = output.logits[item.rows]
                seq = item.seq
                paths = [seq.token_ids] if item.completes and item.num_new_tokens else []
                tree = seq.verified_tree
                paths += [
                    [*seq.token_ids, *(tree.token_ids[step] for step in tree.path(node))]
                    for node in range(item.tree_nodes if tree is not None else 0)
                    if tree is not None
                ]
                for path, row in zip(paths, rows, strict=True):
                    self._compare(path, row)
                if item.tree_nodes:
                    self._engine.accept(seq, [node for node in accept if node < item.tree_nodes])

    def _compare(self, tokens: list[int], row: torch.Tensor) -> None:
        with torch.inference_mode():
            ids = torch.tensor([tokens])
            output: Any = self._model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        wanted = output.logits[0, -1].float()
        allowed = wanted > -1e30  # some classes forbid their tokens of images
        difference = (row - wanted)[allowed].abs().max() / wanted[allowed].std()
        self.difference = max(self.difference, float(difference))
        self.num_rows += 1


def _can_tap(runner: ModelRunner) -> bool:
    try:
        runner.check_tap((1, runner.num_layers, FINAL))
    except TapRefused:
        return False
    return True


def _can_skip(runner: ModelRunner) -> bool:
    try:
        runner.without(SkippedSublayers(mlp=frozenset({0})))
    except (EngineError, ValueError):
        return False
    return True
