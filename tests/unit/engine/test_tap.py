"""Hidden states beside logits: those of transformers, at no change of any logit, on every path that runs a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.engine.block_pool import BlockPool
from specdec.engine.engine import Engine
from specdec.engine.errors import TapRefused
from specdec.engine.leading_runner import LeadingRunner
from specdec.engine.model.runner import ModelRunner
from specdec.engine.outputs import StepOutput
from specdec.engine.scheduler import Scheduler
from specdec.engine.settings import EngineSettings
from specdec.engine.tap import FINAL, joined
from specdec.engine.tree import TokenTree
from tests.support.engine.paged_scenarios import random_tokens
from tests.support.engine.tiny_models import SUPPORTED, VOCAB_SIZE, save_tiny_model

TOKENS = random_tokens(40, 1, VOCAB_SIZE)
IDS = (FINAL, 0, 1, 2)
PATHS = {"fastest kernels": {}, "native kernels": {"fused": "off", "num_threads": 2}, "torch alone": {"native": "off"}}


def load(directory: Path, **settings: object) -> ModelRunner:
    defaults: dict[str, object] = {"model": str(directory), "block_size": 8, "num_blocks": 64, "device": "cpu"}
    return ModelRunner.load(EngineSettings.model_validate({**defaults, **settings}))


def hidden_of(directory: Path, tokens: list[int]) -> dict[int, torch.Tensor]:
    """transformers' own, by id, of every token."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states
    return {FINAL: states[-1][0], **{layer: states[layer][0] for layer in range(len(states) - 1)}}


def play(runner: ModelRunner, tap_ids: tuple[int, ...], max_batch_tokens: int = 16) -> list[tuple[int, StepOutput]]:
    """A prompt in chunks beside another sequence, then a chain and a tree with a branch; steps with their sequence."""
    pool = BlockPool(runner.num_blocks, runner.block_size)
    engine = Engine(runner, pool, Scheduler(pool, max_batch_tokens, 8, runner.max_model_len))
    engine.tap_ids = tap_ids
    other = engine.add(random_tokens(19, 2, VOCAB_SIZE), num_prompt_tokens=19)
    seq = engine.add(TOKENS[:30], num_prompt_tokens=30)
    outputs = []
    while (output := engine.step()) is not None:
        outputs.append((seq.seq_id, output))
    engine.append(other, [5])
    engine.append(seq, TOKENS[30:31])
    seq.tree = TokenTree([TOKENS[31], 7, TOKENS[32], 9], [-1, -1, 0, 1])
    output = engine.step()
    assert output is not None
    return [*outputs, (seq.seq_id, output)]


@pytest.mark.parametrize("how", PATHS)
@pytest.mark.parametrize("name", list(SUPPORTED))
def test_hidden_states_are_those_of_transformers_and_logits_keep_every_bit(name: str, how: str, tmp_path: Path) -> None:
    directory = save_tiny_model(name, tmp_path)
    runner = load(directory, **PATHS[how])
    runner.check_tap(IDS)
    expected = hidden_of(directory, TOKENS)
    branch = hidden_of(directory, [*TOKENS[:31], 7, 9])
    plain, tapped = play(runner, ()), play(runner, IDS)
    seen = 0
    for (_, without), (seq_id, output) in zip(plain, tapped, strict=True):
        assert without.hidden is None
        assert torch.equal(without.logits, output.logits)
        assert output.hidden is not None
        assert output.hidden.shape[:2] == (output.num_tokens, len(IDS))
        for item in output.items:
            assert item.batch_rows.stop - item.batch_rows.start == item.num_new_tokens + item.tree_nodes
            if item.seq.seq_id != seq_id:
                continue
            rows = output.hidden[item.batch_rows]
            positions = list(range(item.start, item.start + item.num_new_tokens))
            wanted = [[expected[layer][position] for layer in IDS] for position in positions]
            if item.tree_nodes:
                nodes = [(expected, 31), (branch, 31), (expected, 32), (branch, 32)]
                wanted += [[states[layer][position] for layer in IDS] for states, position in nodes]
            want = torch.stack([torch.stack(row) for row in wanted])
            assert (rows - want).abs().max() < 1e-5 * max(1.0, float(want.abs().max()))
            seen += len(rows)
    assert seen == 31 + 4


def test_the_last_layer_may_be_tapped_before_the_final_norm(tmp_path: Path) -> None:
    directory = save_tiny_model("llama", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for settings in PATHS.values():
        [(_, output), *_] = play(load(directory, **settings), (3, FINAL))
        assert output.hidden is not None
        last, final = output.hidden.unbind(1)
        with torch.inference_mode():
            assert torch.allclose(model.model.norm(last), final, atol=1e-5)


def test_the_leading_rank_hands_out_what_it_computes(tmp_path: Path) -> None:
    runner = load(save_tiny_model("llama", tmp_path), fused="off")
    alone = play(runner, IDS)
    leading = LeadingRunner(runner, [])
    leading.num_blocks, leading.block_size, leading.max_model_len = 64, 8, runner.max_model_len  # type: ignore[attr-defined]
    for (_, one), (_, other) in zip(alone, play(leading, IDS), strict=True):  # type: ignore[arg-type]
        assert one.hidden is not None
        assert other.hidden is not None
        assert torch.equal(one.hidden, other.hidden)


@pytest.mark.parametrize(
    ("ids", "reason"), [((4,), "the model's 3 layers"), ((-2,), "the model's 3 layers"), ((1, 1), "named twice")]
)
def test_ids_that_are_no_layers_are_refused_by_their_number(ids: tuple[int, ...], reason: str, tmp_path: Path) -> None:
    runner = load(save_tiny_model("llama", tmp_path))
    with pytest.raises(TapRefused, match=reason):
        runner.check_tap(ids)


def test_the_ids_that_several_want_are_each_there_once() -> None:
    assert joined([(2, 5, 7), (FINAL,), (5, 1)]) == (FINAL, 1, 2, 5, 7)
    assert joined([]) == ()
