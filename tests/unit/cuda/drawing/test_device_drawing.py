"""Several tokens in one captured graph are those of the CPU's native call, and stay in slots that their rows own."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from bench.launches import LaunchCounter
from specdec.drafting.translation.runner import TranslatingRunner
from specdec.drafting.translation.shared import SharedVocabulary
from specdec.engine.cuda.passes import CAPTURE_BYTES
from specdec.engine.drawing import device as drawing_module
from specdec.engine.drawing.device import ROUND_BUCKETS, DeviceDrawing
from specdec.engine.drawing.native import DrawingDecoder
from specdec.engine.drawing.rows import Draw, DrawRow, DrawRule, OtherIds
from specdec.engine.drawing.uploads import Layout, call_parts
from specdec.engine.model.runner import ModelRunner
from specdec.wire.sampling_params import SamplingParams
from tests.support.engine.captures import Captures
from tests.support.engine.drawn_rows import (
    BLOCK_SIZE,
    BLOCKS_EACH,
    MANY,
    NUM_TOP,
    PROMPTS,
    logits_of,
    rows_of,
)
from tests.support.engine.triton_device import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="compares with the CPU's native call")


def both(
    runner: ModelRunner, device: DeviceDrawing, rows: list[DrawRow], spoiled: int | None = None
) -> list[list[list[Draw]]]:
    """What either draws, each after prefills of its own."""
    assert runner.fused is not None
    drawn = []
    for drawing in (DrawingDecoder(*runner.fused, runner.vocab_size), device):
        logits = torch.cat([logits_of(runner, prompt, line) for line, prompt in enumerate(PROMPTS)])
        if spoiled is not None:
            logits[spoiled, 3] = math.nan
        drawn.append(drawing.draw(rows, logits, NUM_TOP))
    return drawn


@pytest.mark.parametrize("rounds", [[4, 3, 4], [1, 2, 1], [8, 5, 1], [1, 1, 1]])
def test_draws_are_those_of_the_native_call(
    rounds: list[int], runner: ModelRunner, device: tuple[DeviceDrawing, Captures]
) -> None:
    native, drawn = both(runner, device[0], rows_of(rounds, MANY))
    assert drawn == native
    assert [len(draws) for draws in drawn] == rounds
    most = max(rounds)
    assert device[0].num_passes == (0 if most == 1 else min(each for each in ROUND_BUCKETS if each >= most) - 1)
    for line, (prompt, draws) in enumerate(zip(PROMPTS, drawn, strict=True)):
        tokens = [*prompt, *(token_ids[0] for token_ids, _ in draws)]
        following = logits_of(runner, tokens, line, start=len(tokens) - 1)
        assert torch.equal(following, logits_of(runner, tokens, 3)), "its keys and values are those of a prefill"


@pytest.mark.parametrize(
    "options",
    [{"least_path_score": 0.05}, {"least_fork_score": 0.2}, {"ends_all": True, "least_path_score": 0.02}],
)
def test_rows_end_where_those_of_the_native_call_do(
    options: dict[str, Any], runner: ModelRunner, device: tuple[DeviceDrawing, Captures]
) -> None:
    many = [{**each, "temperature": 0.3, "stop_token_ids": tuple(range(0, 131, 7))} for each in MANY]
    native, drawn = both(runner, device[0], rows_of([8, 8, 8], many, **options))
    assert drawn == native


@pytest.mark.parametrize("lacks", [(), range(3, 131, 2)])
def test_draws_by_other_ids_are_those_of_the_native_call(
    lacks: Iterable[int], runner: ModelRunner, device: tuple[DeviceDrawing, Captures]
) -> None:
    assert runner.fused is not None
    order = torch.randperm(131, generator=torch.Generator().manual_seed(4)).tolist()
    ids = OtherIds(order, [-1 if index in lacks else own for index, own in enumerate(order)])
    translating = TranslatingRunner(
        runner, SharedVocabulary(131, 0, 0, ids.inputs, ids.columns, ()), 131, torch.device("cpu")
    )
    drawn = []
    for drawing in (DrawingDecoder(*runner.fused, runner.vocab_size), device[0]):
        logits = torch.cat([logits_of(translating, prompt, line) for line, prompt in enumerate(PROMPTS)])
        drawn.append(drawing.by_ids(ids).draw(rows_of([8, 5, 1], MANY), logits, NUM_TOP))
    assert drawn[1] == drawn[0]
    assert [len(draws) for draws in drawn[1]] == [8, 5, 1]
    assert device[1].num_replayed == 1


def test_a_row_that_is_not_finite_ends_alone(runner: ModelRunner, device: tuple[DeviceDrawing, Captures]) -> None:
    native, drawn = both(runner, device[0], rows_of([4, 4, 4], MANY), spoiled=1)
    assert [drawn[0], drawn[2]] == [native[0], native[2]]
    [(_, scores)] = drawn[1]
    assert all(math.isnan(score) for score in scores)


CUTS: list[dict[str, Any]] = [{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.8, "min_p": 0.01}]


@pytest.mark.parametrize("cut", CUTS, ids=[" ".join(cut) for cut in CUTS])
def test_rows_with_cuts_are_drawn_several_times_a_call_as_the_native_call_draws_them(
    cut: dict[str, Any], runner: ModelRunner, device: tuple[DeviceDrawing, Captures]
) -> None:
    many = [MANY[0], {**MANY[1], **cut}, MANY[2]]
    rounds = [4, 4, 4] if len(cut) == 1 else [2, 2, 1]
    native, drawn = both(runner, device[0], rows_of(rounds, many))
    assert [len(draws) for draws in drawn] == rounds
    assert drawn == native


def test_graphs_with_cuts_are_replayed_for_other_cuts_of_their_kind(
    runner: ModelRunner, device: tuple[DeviceDrawing, Captures]
) -> None:
    drawing, captures = device
    for cut in ({"top_k": 2}, {"top_k": 5}, {"min_p": 0.1}, {"min_p": 0.3}, {}):
        native, drawn = both(runner, drawing, rows_of([2, 2, 2], [{**each, **cut} for each in MANY]))
        assert drawn == native
    assert (captures.num_captured, captures.num_replayed) == (2, 5), "min-p is every graph's"


def test_rows_with_cuts_are_drawn_once_where_nothing_can_be_captured(
    runner: ModelRunner, device: tuple[DeviceDrawing, Captures]
) -> None:
    device[0].drop(for_good=True)
    native, drawn = both(runner, device[0], rows_of([4, 4, 4], [{**each, "top_k": 2} for each in MANY]))
    assert [len(draws) for draws in drawn] == [1, 1, 1]
    assert drawn == [[draws[0]] for draws in native]


def test_nothing_is_written_but_what_rows_own_and_the_spare_block(
    runner: ModelRunner, device: tuple[DeviceDrawing, Captures]
) -> None:
    logits = torch.cat([logits_of(runner, prompt, line) for line, prompt in enumerate(PROMPTS)])
    cache = runner._cache
    before = [store.clone() for store in (*cache.keys, *cache.values)]
    rounds = [1, 3, 2]
    device[0].draw(rows_of(rounds, MANY), logits, NUM_TOP)
    owned = {
        (line * BLOCKS_EACH + position // BLOCK_SIZE, position % BLOCK_SIZE)
        for line, (prompt, num) in enumerate(zip(PROMPTS, rounds, strict=True))
        for position in range(len(prompt), len(prompt) + num - 1)
    }
    for old, new in zip(before, (*cache.keys, *cache.values), strict=True):
        places = (old != new).any(dim=3).any(dim=1).nonzero().tolist()
        assert {tuple(place) for place in places} - {(cache.num_blocks - 1, 0)} == owned


def test_calls_of_one_shape_replay_one_graph_and_prepared_ones_are_there(
    runner: ModelRunner, device: tuple[DeviceDrawing, Captures]
) -> None:
    drawing, captures = device
    drawing.prepare(NUM_TOP)
    num_prepared = captures.num_captured
    assert num_prepared == 4 * len(ROUND_BUCKETS) + 1, "and a step of one row, for comparison"
    replayed = captures.num_replayed
    for rounds in ([4, 3, 4], [3, 3, 3], [2, 1, 2], [8, 2, 1]):
        both(runner, drawing, rows_of(rounds, MANY))
    assert (captures.num_captured, captures.num_replayed - replayed) == (num_prepared, 4)


def test_graphs_are_prepared_within_the_memory_that_steps_have_left(
    device: tuple[DeviceDrawing, Captures], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing, captures = device
    monkeypatch.setattr(captures, "_bytes_each", CAPTURE_BYTES // 2)
    drawing.prepare(NUM_TOP)
    assert captures.num_captured == 3


def test_a_graph_that_draws_other_tokens_than_single_steps_draws_nothing(
    runner: ModelRunner, device: tuple[DeviceDrawing, Captures], monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(words: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
        parts = call_parts(words, layout)
        order = [0, 0, *range(2, len(parts["positions"]))]
        return parts | {"positions": parts["positions"][order]}

    monkeypatch.setattr(drawing_module, "call_parts", late)
    monkeypatch.setattr(drawing_module, "_PREPARED_ROWS", (1,))
    drawing = device[0]
    drawing.prepare(NUM_TOP)
    assert drawing.has_failed
    native, drawn = both(runner, drawing, rows_of([4, 4, 4], MANY))
    assert drawn == [[draws[0]] for draws in native]


def test_graphs_become_shorter_where_most_of_what_they_draw_is_dropped(
    runner: ModelRunner, device: tuple[DeviceDrawing, Captures]
) -> None:
    logits = torch.cat([logits_of(runner, prompt, line) for line, prompt in enumerate(PROMPTS)])
    passes = []
    for _ in range(25):
        device[0].draw(rows_of([8, 8, 8], MANY, least_path_score=1.1), logits, NUM_TOP)
        passes.append(device[0].num_passes)
    assert passes[0] == 7
    assert passes[-1] < 7
    assert passes == sorted(passes, reverse=True)


def test_a_position_out_of_the_models_range_is_an_error(
    runner: ModelRunner, device: tuple[DeviceDrawing, Captures]
) -> None:
    row = DrawRow(DrawRule(SamplingParams(max_tokens=9, seed=3)), 0, runner.max_model_len, 2, array("i", [0] * 100))
    with pytest.raises(IndexError, match="position"):
        device[0].draw([row], torch.zeros(1, runner.num_logits), NUM_TOP)


def test_between_two_passes_are_few_launches(
    runner: ModelRunner, device: tuple[DeviceDrawing, Captures], monkeypatch: pytest.MonkeyPatch
) -> None:
    both(runner, device[0], rows_of([4, 4, 4], MANY))
    store = device[0]
    [(key, graph)] = store._graphs.items()
    monkeypatch.setattr(device[0]._steps, "forward", lambda batch, cache: torch.zeros(4, runner.num_logits))
    with torch.inference_mode(), LaunchCounter() as counter:
        graph.replay()
    names = [launch.name for launch in counter.launches]
    assert names == ["draw_kernel"] * (key[0].num_draws - 1)
    counts = Counter(name for name, _ in counter.operations)
    assert counts["rsub"] == counts["amax"] == counts["topk"] == key[0].num_draws - 1
