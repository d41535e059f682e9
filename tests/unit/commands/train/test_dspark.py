"""A DSpark head in training computes what it computes when it serves."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch

from specdec.commands.train.job import Loaded
from specdec.commands.train.kinds.dspark import DSparkTrainee
from specdec.commands.train.recipe import TrainingRefused
from specdec.commands.train.recorded.states import record_states
from specdec.commands.train.recorded.texts import Text
from specdec.commands.train.trial import trials
from specdec.config.drafter_options import DSparkOptions
from specdec.drafting.heads.methods.dspark import DSpark
from specdec.drafting.heads.methods.registry import make_head
from tests.unit.commands.train.small import all_logits, quiet, recipe_of, trained, weights
from tests.unit.drafting.heads.dense import block_states, spark_logits

RECIPE = recipe_of("dspark", num_steps=8, num_depths=3, num_layers=2, draft_vocab_size=24)


def as_wide(loaded: Loaded) -> Loaded:
    """The same target, whose heads are written as wide as they learn: then nothing differs by rounding."""
    return dataclasses.replace(loaded, parts=dataclasses.replace(loaded.parts, dtype=torch.float32))


def served(loaded: Loaded, folder: Path) -> DSpark:
    head = make_head(DSparkOptions(model=str(folder / "out")), loaded.for_heads)
    assert isinstance(head, DSpark)
    return head


def test_what_dspark_learns_on_is_what_it_computes_when_it_serves(
    loaded: Loaded, texts: list[Text], tmp_path: Path
) -> None:
    """Logits and confidence of each slot, after the target's tokens, are those of a block alone after the text."""
    loaded = as_wide(loaded)
    trainee = trained(loaded, texts, RECIPE, tmp_path).trainee
    head = served(loaded, tmp_path)
    states = record_states(loaded.engine, loaded.runner, texts, RECIPE.layer_ids, tmp_path / "work", quiet)
    batch = states.batch([0, 5], loaded.parts.device)
    with torch.inference_mode():
        depths = list(trainee.guesses(batch, 3))
        assert [guesses.depth for guesses in depths] == [0, 1, 2]
        for text, place in itertools.product(range(2), (0, 4, 9)):
            tokens = batch.token_ids[text].tolist()
            taps, anchor = batch.taps[text, : place + 1], tokens[place + 1]
            hidden = block_states(head, taps, anchor)
            for guesses in depths:
                path = tokens[place + 2 : place + 2 + guesses.depth]
                expected = spark_logits(head, taps, anchor, path)
                logits, share = guesses.at(torch.tensor([text]), torch.tensor([place]))
                assert torch.allclose(logits[0], expected, atol=1e-4), (place, guesses.depth)
                row = hidden[guesses.depth : guesses.depth + 1]
                before = torch.tensor([anchor, *path])[-1:]
                _, confidence, _ = head.spark.bias(before, row, row.new_zeros(1, head.spark.rank))
                assert confidence is not None
                assert share is not None
                assert torch.allclose(share, confidence, atol=1e-4)


def test_first_guesses_of_a_served_text_are_those_of_training(
    loaded: Loaded, texts: list[Text], tmp_path: Path
) -> None:
    loaded = as_wide(loaded)
    trainee = trained(loaded, texts, RECIPE, tmp_path).trainee
    assert trainee.target_ids is not None
    text = texts[0]
    assert text.temperature == 0.0
    num = len(text.output_ids) - 1
    assert num > 4
    found = list(trials(loaded, served(loaded, tmp_path), text.prompt_ids, num, num_drafted=3, salt=b"dspark"))
    assert [trial.actual for trial in found] == list(text.output_ids[1:])
    states = record_states(loaded.engine, loaded.runner, texts, RECIPE.layer_ids, tmp_path / "work", quiet)
    with torch.inference_mode():
        first = next(iter(trainee.guesses(states.batch([0], loaded.parts.device), 1)))
        best = trainee.target_ids[all_logits(first, 0).argmax(-1)]
    start = len(text.prompt_ids) - 1
    assert [trial.guessed for trial in found] == best[start : start + num].tolist()


def test_a_guess_depends_on_no_token_after_those_that_it_is_given(
    loaded: Loaded, texts: list[Text], tmp_path: Path
) -> None:
    trainee = trained(loaded, texts, RECIPE, tmp_path).trainee
    states = record_states(loaded.engine, loaded.runner, texts, RECIPE.layer_ids, tmp_path / "work", quiet)
    batch = states.batch([0], loaded.parts.device)
    other = dataclasses.replace(batch, token_ids=batch.token_ids.clone(), taps=batch.taps.clone())
    other.token_ids[:, 8:] = (other.token_ids[:, 8:] + 1) % 40
    other.taps[:, 8:] += 1.0
    with torch.inference_mode():
        for one, two in zip(trainee.guesses(batch, 3), trainee.guesses(other, 3), strict=True):
            num = 7 - one.depth  # Places whose context ends before token 8, and so does their path.
            mine, others = all_logits(one, 0), all_logits(two, 0)
            assert torch.allclose(mine[:num], others[:num], atol=1e-6)
            assert not torch.allclose(mine[num], others[num], atol=1e-3)


def test_its_checkpoint_holds_what_is_its_own_under_the_names_of_speculators(
    loaded: Loaded, texts: list[Text], tmp_path: Path
) -> None:
    trained(loaded, texts, RECIPE, tmp_path)
    tensors = weights(tmp_path)
    assert "embed_tokens.weight" not in tensors
    shapes = {name: tuple(value.shape) for name, value in tensors.items() if not name.startswith("layers.")}
    assert shapes == {
        "fc.weight": (16, 48),
        "hidden_norm.weight": (16,),
        "norm.weight": (16,),
        "lm_head.weight": (24, 16),
        "markov_head.markov_w1.weight": (40, 8),
        "markov_head.markov_w2.weight": (24, 8),
        "confidence_head.proj.weight": (1, 24),
        "confidence_head.proj.bias": (1,),
        "d2t": (24,),
        "t2d": (40,),
    }
    fixture = Path(__file__).parents[3] / "fixtures" / "heads" / "dspark-vanilla" / "config.json"
    of_speculators, ours = (json.loads(file.read_text()) for file in (fixture, tmp_path / "out" / "config.json"))
    assert ours["architectures"] == of_speculators["architectures"]
    assert ours["transformer_layer_config"]["model_type"] == of_speculators["transformer_layer_config"]["model_type"]
    assert ours["block_size"] == RECIPE.num_depths
    assert not ours.keys() - of_speculators.keys() - {"specdec_training"}


@pytest.mark.parametrize("rank", [0, 8])
def test_a_mask_has_the_last_embedding_that_is_not_zero(
    rank: int, loaded: Loaded, texts: list[Text], tmp_path: Path
) -> None:
    embedding = loaded.parts.embedding.clone()
    embedding[37:] = 0
    padded = dataclasses.replace(loaded, parts=dataclasses.replace(loaded.parts, embedding=embedding))
    recipe = dataclasses.replace(RECIPE, markov_rank=rank, num_steps=1)
    trainee = trained(padded, texts, recipe, tmp_path).trainee
    assert isinstance(trainee, DSparkTrainee)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["mask_token_id"] == 36
    assert served(loaded, tmp_path).spark.rank == rank
    none = dataclasses.replace(loaded, parts=dataclasses.replace(loaded.parts, embedding=torch.zeros_like(embedding)))
    with pytest.raises(TrainingRefused, match="embedding is zero"):
        trained(none, texts, recipe, tmp_path / "none")
