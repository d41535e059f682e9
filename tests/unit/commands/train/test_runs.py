"""Small runs over a target as small as it gets: they learn, they go on after a stop, and what they write is served."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch

from specdec.commands.train.checkpoint import RECIPE_KEY
from specdec.commands.train.job import Loaded, load_target
from specdec.commands.train.kinds.eagle3 import Eagle3Trainee
from specdec.commands.train.layer_ids import neighbouring_layer_ids
from specdec.commands.train.loop import rate
from specdec.commands.train.losses import LOSSES
from specdec.commands.train.pace import Seldom
from specdec.commands.train.recipe import KINDS, TrainingRefused
from specdec.commands.train.recorded.states import record_states
from specdec.commands.train.recorded.texts import Text
from specdec.commands.train.trial import try_head_layers
from specdec.commands.train.worth import StepCosts, measured_costs, speeds
from specdec.config.drafter_options import DSparkOptions, Eagle3Options, MedusaOptions
from specdec.drafting.heads.config import read_config
from specdec.drafting.heads.methods.dspark import DSpark
from specdec.drafting.heads.methods.medusa import Medusa
from specdec.drafting.heads.methods.registry import make_head
from specdec.drafting.heads.parts import dense_attention
from specdec.drafting.heads.serial import SerialHead
from tests.unit.commands.train.small import NUM_STEPS, RECIPE, all_logits, quiet, recipe_of, trained, weights
from tests.unit.drafting.heads.dense import chain_logits


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_run_of_each_kind_lowers_its_loss_and_raises_acceptance(
    kind: str, loaded: Loaded, texts: list[Text], tmp_path: Path
) -> None:
    losses: list[float] = []
    recipe = recipe_of(kind)
    result = trained(loaded, texts, recipe, tmp_path, lambda _, loss: losses.append(loss))
    assert len(losses) == NUM_STEPS
    assert sum(losses[-5:]) < sum(losses[:5])
    for before, after in zip(result.before, result.after, strict=True):
        assert after.num_places == before.num_places > 50
    sampled = [result.before[1], result.after[1]]
    assert sampled[1].coupled[0] > sampled[0].coupled[0]
    for each in sampled:
        assert each.coupled == sorted(each.coupled, reverse=True)
        assert all(mine <= other + 1e-6 for mine, other in zip(each.coupled, each.ratio, strict=True))


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_can_be_trained_with(loss: str, loaded: Loaded, texts: list[Text], tmp_path: Path) -> None:
    recipe = recipe_of("medusa", loss=loss, draft_vocab_size=20)
    result = trained(loaded, texts, recipe, tmp_path)
    assert result.after[1].coupled[0] > result.before[1].coupled[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_stopped_and_started_again_gives_the_weights_of_one_that_was_not(
    kind: str, loaded: Loaded, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Seldom, "due", True)  # it saves and measures after every step
    recipe = recipe_of(kind, num_steps=9)
    trained(loaded, texts, recipe, tmp_path / "whole")

    def stop(done: int, _: float) -> None:
        if done in (3, 7):
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            trained(loaded, texts, recipe, tmp_path / "stopped", stop)
    steps: list[int] = []
    trained(loaded, texts, recipe, tmp_path / "stopped", lambda done, _: steps.append(done))
    assert steps == [8, 9]
    whole, stopped = weights(tmp_path / "whole"), weights(tmp_path / "stopped")
    assert whole.keys() == stopped.keys()
    assert all(torch.equal(value, stopped[name]) for name, value in whole.items())


def test_the_state_of_another_run_is_refused_by_name(loaded: Loaded, texts: list[Text], tmp_path: Path) -> None:
    trained(loaded, texts, dataclasses.replace(RECIPE, num_steps=1), tmp_path)
    with pytest.raises(TrainingRefused, match="other learning_rate, num_steps"):
        trained(loaded, texts, dataclasses.replace(RECIPE, num_steps=2, learning_rate=0.5), tmp_path)


def test_prepared_products_of_many_lengths_do_not_fill_the_memory(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, folder = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(loaded.parts.directory)
    monkeypatch.delenv(name)
    load_target(folder, "cpu", 1)
    assert int(os.environ[name]) < 100
    monkeypatch.setenv(name, "7")
    load_target(folder, "cpu", 1)
    assert os.environ[name] == "7"


def test_texts_without_any_to_measure_on_are_refused(loaded: Loaded, texts: list[Text], tmp_path: Path) -> None:
    with pytest.raises(TrainingRefused, match="no held-out text"):
        trained(loaded, [text for text in texts if not text.is_held_out], RECIPE, tmp_path)


@pytest.mark.parametrize("draft_vocab_size", [None, 24])
def test_checkpoints_are_loaded_by_the_heads_that_serve_and_say_how_they_were_made(
    draft_vocab_size: int | None, loaded: Loaded, texts: list[Text], tmp_path: Path
) -> None:
    for options in (Eagle3Options, DSparkOptions, MedusaOptions):
        kind = options.model_fields["method"].default
        recipe = recipe_of(kind, num_steps=2, draft_vocab_size=draft_vocab_size)
        trained(loaded, texts, recipe, tmp_path / kind)
        out = tmp_path / kind / "out"
        head = make_head(options(model=str(out)), loaded.for_heads)  # type: ignore[call-arg]
        config = json.loads((out / "config.json").read_text())
        assert config[RECIPE_KEY] == recipe.as_json()
        if isinstance(head, SerialHead | DSpark):
            assert head.layer_ids == recipe.layer_ids
            assert head.vocabulary.draft_size == (draft_vocab_size or 40)
            assert read_config(config).num_speculative_tokens == recipe.num_depths
        else:
            assert isinstance(head, Medusa)


def test_what_eagle3_learns_on_is_what_it_computes_when_it_serves(
    loaded: Loaded, texts: list[Text], tmp_path: Path
) -> None:
    """Guesses of a depth in training, from a place, are those of a chain over the committed tokens before it."""
    result = trained(loaded, texts, dataclasses.replace(RECIPE, num_steps=2), tmp_path)
    trainee = result.trainee
    assert isinstance(trainee, Eagle3Trainee)
    states = record_states(loaded.engine, loaded.runner, texts, RECIPE.layer_ids, tmp_path / "work", quiet)
    with torch.inference_mode():
        batch = states.batch([0, 5], loaded.parts.device)
        depths = list(trainee.guesses(batch, 3))
        for text in range(2):
            logits = [all_logits(guesses, text) for guesses in depths]
            tokens = batch.token_ids[text].tolist()
            for place in (4, 9):
                for depth in range(3):
                    taps = batch.taps[text, : place + 1]
                    expected = chain_logits(trainee.module, taps, tokens[1 : place + 2 + depth], dense_attention)  # type: ignore[arg-type]
                    assert torch.allclose(logits[depth][place], expected, atol=1e-4), (place, depth)


def test_speeds_are_tokens_over_the_time_of_drafting_and_verifying() -> None:
    costs = StepCosts(plain_ms=4.0, verify_ms=[5.0, 6.0], draft_ms=[1.0, 2.0])
    one, two = speeds([0.8, 0.5], costs)
    assert (one.tokens_per_step, one.tokens_per_s, one.speedup) == pytest.approx((1.8, 300.0, 1.2))
    assert (two.tokens_per_step, two.tokens_per_s, two.speedup) == pytest.approx((2.3, 287.5, 1.15))


@pytest.mark.parametrize("kind", KINDS)
def test_costs_are_measured_with_the_checkpoint_as_it_is_served(
    kind: str, loaded: Loaded, texts: list[Text], tmp_path: Path
) -> None:
    recipe = recipe_of(kind, num_steps=1)
    trained(loaded, texts, recipe, tmp_path)
    costs = measured_costs(loaded, recipe, tmp_path / "out")
    assert len(costs.verify_ms) == len(costs.draft_ms) == recipe.num_depths
    assert min(costs.plain_ms, *costs.verify_ms, *costs.draft_ms) > 0


def test_the_rate_rises_in_a_line_and_falls_along_a_cosine() -> None:
    recipe = dataclasses.replace(RECIPE, num_steps=100, warmup_share=0.1)
    rates = [rate(step, recipe) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates[55] == pytest.approx(0.5)
    assert 0 < rates[99] < 0.001


def test_a_head_over_other_layers_than_its_own_is_found_out_by_trying(
    loaded: Loaded, texts: list[Text], tmp_path: Path
) -> None:
    recipe = dataclasses.replace(RECIPE, num_steps=60, layer_ids=(1, 2, 3))
    trained(loaded, texts, recipe, tmp_path)
    prompts = [text.prompt_ids for text in texts[:12]]
    head = Eagle3Options(model=str(tmp_path / "out"))
    right = try_head_layers(loaded, head, prompts, 10)
    assert right is not None
    assert right.trials[0].layer_ids == (1, 2, 3)
    assert [trial.layer_ids for trial in right.trials[1:]] == neighbouring_layer_ids((1, 2, 3), 4)
    assert right.trials[0].acceptance > 0.5
    assert right.advised is None
