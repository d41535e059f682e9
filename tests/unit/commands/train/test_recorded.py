"""What a run keeps in its folder: outputs, states and the target's probabilities; a stopped run goes on with them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from specdec.commands.train.job import Loaded
from specdec.commands.train.recipe import TrainingRefused
from specdec.commands.train.recorded.continued import ContinuationTask, make_texts
from specdec.commands.train.recorded.journal import OutputJournal
from specdec.commands.train.recorded.states import States, record_states
from specdec.commands.train.recorded.teachers import next_token_probs, record_teachers
from specdec.commands.train.recorded.texts import Text
from tests.unit.commands.train.small import quiet

LAYERS = (1, 2, 3)


@pytest.fixture
def states(loaded: Loaded, texts: list[Text], tmp_path: Path) -> States:
    return record_states(loaded.engine, loaded.runner, texts, LAYERS, tmp_path, quiet)


def stopping_at(number: int) -> object:
    """A listener that stops the run when it is told something for the n-th time."""
    counter = itertools.count(1)

    def tell(_: str) -> None:
        if next(counter) == number:
            raise KeyboardInterrupt

    return tell


def test_all_probabilities_are_kept_if_there_are_no_more_than_asked(
    loaded: Loaded, states: States, tmp_path: Path
) -> None:
    lm_head = loaded.parts.lm_head
    for target_ids in (None, torch.arange(0, 40, 2)):
        teachers = record_teachers(states, lm_head, target_ids, 40, tmp_path, quiet)
        number = states.numbers(held_out=False)[3]
        taught = teachers.batch([number], loaded.parts.device)
        finals = states.batch([number], loaded.parts.device).finals[0]
        expected = next_token_probs(finals, lm_head, target_ids)
        assert torch.equal(taught.columns[0], torch.arange(expected.shape[1]).expand_as(expected))
        assert torch.allclose(taught.probs[0, :, :-1], expected, atol=1e-6)
        assert not taught.probs[..., -1].any()


def test_the_likeliest_are_kept_and_the_rest_as_a_sum_of_what_the_drafter_can_propose(
    loaded: Loaded, states: States, tmp_path: Path
) -> None:
    lm_head, target_ids = loaded.parts.lm_head, torch.arange(0, 40, 2)
    teachers = record_teachers(states, lm_head, target_ids, 5, tmp_path, quiet)
    numbers = states.numbers(held_out=False)[:2]
    taught = teachers.batch(numbers, loaded.parts.device)
    for place, number in enumerate(numbers):
        finals = states.batch([number], loaded.parts.device).finals[0]
        expected = next_token_probs(finals, lm_head, target_ids)
        probs = taught.probs[place, : len(finals)]
        assert torch.allclose(probs[:, :-1].sort(descending=True).values, expected.topk(5).values, atol=1e-6)
        found = expected.gather(-1, taught.columns[place, : len(finals)])
        assert torch.allclose(found, probs[:, :-1], atol=1e-6)
        assert torch.allclose(probs.sum(-1), expected.sum(-1), atol=1e-5)
        assert not taught.probs[place, len(finals) :].any()


def test_other_vocabularies_and_numbers_have_files_of_their_own(loaded: Loaded, states: States, tmp_path: Path) -> None:
    lm_head, half = loaded.parts.lm_head, torch.arange(0, 40, 2)
    first = record_teachers(states, lm_head, half, 5, tmp_path, quiet).probs.clone()
    record_teachers(states, lm_head, half + 1, 5, tmp_path, quiet)
    record_teachers(states, lm_head, half, 6, tmp_path, quiet)

    def refuse(_: str) -> None:
        raise AssertionError("computed again")

    assert torch.equal(record_teachers(states, lm_head, half, 5, tmp_path, refuse).probs, first)


def test_interrupted_records_go_on_with_the_texts_that_are_missing(
    loaded: Loaded, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.commands.train.recorded.mapped._SAVE_EVERY_S", 0.0)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    found = []
    for folder in (whole, stopped):
        folder.mkdir()
        told: list[str] = []
        if folder == stopped:
            with pytest.raises(KeyboardInterrupt):
                record_states(loaded.engine, loaded.runner, texts, LAYERS, folder, stopping_at(5))  # type: ignore[arg-type]
            assert loaded.engine.tap_ids == ()
        states = record_states(loaded.engine, loaded.runner, texts, LAYERS, folder, told.append)
        assert len(told) == len(texts) - (4 if folder == stopped else 0)
        if folder == stopped:
            with pytest.raises(KeyboardInterrupt):
                record_teachers(states, loaded.parts.lm_head, None, 4, folder, stopping_at(3))  # type: ignore[arg-type]
        teachers = record_teachers(states, loaded.parts.lm_head, None, 4, folder, quiet)
        found.append((states.rows, teachers.columns, teachers.probs))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_final_states_of_a_run_that_read_more_layers_are_not_computed_again(
    loaded: Loaded, texts: list[Text], states: States, tmp_path: Path
) -> None:
    told: list[str] = []
    finals = record_states(loaded.engine, loaded.runner, texts, (), tmp_path, told.append)
    assert told == []
    assert torch.equal(finals.rows, states.rows[:, -1:])
    other = record_states(loaded.engine, loaded.runner, texts[:5], (), tmp_path, told.append)
    assert len(told) == 5
    assert torch.equal(other.rows, finals.rows[: len(other.rows)])


def test_outputs_of_a_stopped_run_are_not_asked_for_again(loaded: Loaded, tmp_path: Path) -> None:
    prompts = tuple(tuple((3 * i + j) % 40 for j in range(4)) for i in range(40))
    asked = ContinuationTask(prompts=prompts, held_out=(), temperatures=(1.0, 0.0), max_tokens=9, seed=3)
    whole = make_texts(asked, loaded.engine, loaded.runner, tmp_path / "whole", quiet)
    with pytest.raises(KeyboardInterrupt):
        make_texts(asked, loaded.engine, loaded.runner, tmp_path / "stopped", stopping_at(11))  # type: ignore[arg-type]
    file = tmp_path / "stopped" / "texts.jsonl"
    assert len(file.read_text().splitlines()) == 12
    file.write_bytes(file.read_bytes()[:-3])  # the last line was cut off as well
    told: list[str] = []
    assert make_texts(asked, loaded.engine, loaded.runner, tmp_path / "stopped", told.append) == whole
    assert len(told) == len(whole) - 10
    assert make_texts(asked, loaded.engine, loaded.runner, tmp_path / "stopped", stopping_at(1)) == whole  # type: ignore[arg-type]


def test_outputs_of_other_prompts_are_refused(tmp_path: Path) -> None:
    OutputJournal(tmp_path / "texts.jsonl", {"seed": 1})
    with pytest.raises(TrainingRefused, match="over other texts"):
        OutputJournal(tmp_path / "texts.jsonl", {"seed": 2})
