"""Several tokens in one captured graph are those of the CPU's native call, and stay in slots that their rows own."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.drafting.translation.runner import TranslatingRunner
from specdec.drafting.translation.shared import SharedVocabulary
from specdec.engine.batch import build_batch
from specdec.engine.cuda.launch import LaunchCounter
from specdec.engine.drawing.device import ROUND_BUCKETS, DeviceDrawing
from specdec.engine.drawing.native import DrawingDecoder
from specdec.engine.drawing.other_ids import OtherIds
from specdec.engine.drawing.rows import Draw, DrawRow, DrawRule
from specdec.engine.drawing.sparse import launch_sparse, read_sparse, sparse_rows
from specdec.engine.model.runner import ModelRunner
from specdec.engine.runner import Runner
from specdec.engine.sampling.logit_processors import RowContext
from specdec.engine.sampling.noise import Purpose, uniform
from specdec.engine.sampling.rejection import DraftSample
from specdec.engine.sampling.sampler import Sampler
from specdec.engine.sampling.token_history import TokenHistory
from specdec.engine.scheduler import ScheduledItem, ScheduledStep
from specdec.engine.sequence import Sequence
from specdec.engine.settings import EngineSettings
from specdec.sampling_params import SamplingParams
from tests.support.engine.captures import Captures
from tests.support.engine.device_drawing import device_drawing_of
from tests.support.engine.tiny_models import save_tiny_model
from tests.support.engine.triton_device import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="compares with the CPU's native call")

BLOCK_SIZE, BLOCKS_EACH, NUM_TOP = 4, 10, 3
PROMPTS = [[5, 6, 7], [9], list(range(20))]
MANY: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 9}, {"temperature": 0.6, "choice": 2}]


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    model = str(save_tiny_model("qwen3", tmp_path))
    runner = ModelRunner.load(EngineSettings(model=model, device="cpu", block_size=BLOCK_SIZE, num_blocks=40))
    if runner.fused is None:
        pytest.skip("no native kernels")
    return runner


@pytest.fixture
def device(runner: ModelRunner) -> tuple[DeviceDrawing, Captures]:
    return device_drawing_of(runner)


def blocks_of(line: int) -> array[int]:
    return array("i", range(line * BLOCKS_EACH, (line + 1) * BLOCKS_EACH))


def logits_of(runner: Runner, token_ids: list[int], line: int, start: int = 0) -> torch.Tensor:
    seq = Sequence(seq_id=0, token_ids=token_ids, num_prompt_tokens=len(token_ids), block_ids=blocks_of(line))
    item = ScheduledItem(seq, start, len(token_ids) - start, 0, completes=True)
    return runner.forward(build_batch(ScheduledStep([item]), BLOCK_SIZE, "cpu")[0])


def rows_of(rounds: list[int], many: list[dict[str, Any]], **options: Any) -> list[DrawRow]:
    rows = []
    for line, (prompt, each, num_rounds) in enumerate(zip(PROMPTS, many, rounds, strict=True)):
        rule = DrawRule(SamplingParams(**{"max_tokens": 100, "seed": 3, **each}))
        rows.append(DrawRow(rule, line, len(prompt), num_rounds, blocks_of(line), **options))
    return rows


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
    assert (captures.num_captured, captures.num_replayed) == (3, 5)


def test_rows_with_cuts_are_drawn_once_where_nothing_can_be_captured(
    runner: ModelRunner, device: tuple[DeviceDrawing, Captures]
) -> None:
    device[0]._can_capture = False
    native, drawn = both(runner, device[0], rows_of([4, 4, 4], [{**each, "top_k": 2} for each in MANY]))
    assert [len(draws) for draws in drawn] == [1, 1, 1]
    assert drawn == [[draws[0]] for draws in native]


ADJUSTED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
    {"presence_penalty": 1.0, "logit_bias": {7: 3.0, 11: -100.0}, "top_k": 20},
    {"min_tokens": 3, "eos_token_ids": tuple(range(0, 131, 2))},
    {"allowed_token_ids": tuple(range(0, 131, 5)), "frequency_penalty": 2.0, "temperature": 0.0},
]


def adjusted_rows(rounds: list[int], many: list[dict[str, Any]]) -> list[DrawRow]:
    rows = rows_of(rounds, many)
    for row, prompt in zip(rows, PROMPTS, strict=True):
        if row.rule.params.adjusts_logits:
            row.adjusting = RowContext(row.rule.params, row.position, len(prompt), TokenHistory(prompt))
    return rows


def single_steps(runner: ModelRunner, rows: list[DrawRow]) -> list[list[Draw]]:
    """The same draws, each from a prefill of its own and by the sampler on the CPU."""
    sampler, drawn = Sampler(runner.vocab_size, "cpu"), list[list[Draw]]()
    for line, (row, prompt) in enumerate(zip(rows, PROMPTS, strict=True)):
        output, draws = list[int](), list[Draw]()
        while len(draws) < row.num_rounds and not (output and output[-1] in row.rule.ends):
            tokens = [*prompt, *output]
            context = RowContext(row.rule.params, len(tokens), len(prompt), TokenHistory(prompt), tuple(output))
            [best] = sampler.candidates(logits_of(runner, tokens, line), [context], NUM_TOP)
            draws.append(([each.token_id for each in best], [each.score for each in best]))
            output.append(best[0].token_id)
        drawn.append(draws)
    return drawn


@pytest.mark.parametrize("adjusted", ADJUSTED, ids=[" ".join(each) for each in ADJUSTED])
def test_rows_whose_logits_are_adjusted_are_drawn_several_times_a_call_as_single_steps_draw_them(
    adjusted: dict[str, Any], runner: ModelRunner, device: tuple[DeviceDrawing, Captures]
) -> None:
    rows = adjusted_rows([4, 4, 3], [MANY[0], {**MANY[1], **adjusted}, {**MANY[2], **adjusted}])
    expected = single_steps(runner, rows)
    logits = torch.cat([logits_of(runner, prompt, line) for line, prompt in enumerate(PROMPTS)])
    assert device[0].draw(rows, logits, NUM_TOP) == expected
    assert device[0].num_passes == 3
    assert all(device[0].takes(row.rule) for row in rows)


def test_a_graph_for_adjusted_logits_serves_what_others_ask_for_and_remembers_nothing(
    runner: ModelRunner, device: tuple[DeviceDrawing, Captures]
) -> None:
    drawing, captures = device
    for shift in range(3):
        many = [{**MANY[line], **ADJUSTED[(line + shift) % 4], "top_k": 0} for line in range(3)]
        rows = adjusted_rows([2, 2, 2], many)
        expected = single_steps(runner, rows)
        logits = torch.cat([logits_of(runner, prompt, line) for line, prompt in enumerate(PROMPTS)])
        assert drawing.draw(rows, logits, NUM_TOP) == expected
    assert (captures.num_captured, captures.num_replayed) == (1, 3)


def test_adjusted_rows_are_drawn_once_where_nothing_can_be_captured(
    runner: ModelRunner, device: tuple[DeviceDrawing, Captures]
) -> None:
    device[0]._can_capture = False
    rows = adjusted_rows([4, 4, 4], [{**each, **ADJUSTED[0]} for each in MANY])
    expected = single_steps(runner, rows)
    logits = torch.cat([logits_of(runner, prompt, line) for line, prompt in enumerate(PROMPTS)])
    assert device[0].draw(rows, logits, NUM_TOP) == [draws[:1] for draws in expected]


def test_a_row_that_does_not_tell_what_adjusts_it_is_an_error_and_so_are_bad_words(
    runner: ModelRunner, device: tuple[DeviceDrawing, Captures]
) -> None:
    for asked in ({"min_tokens": 3}, {"bad_words": ((5,),)}):
        rows = rows_of([2, 2, 2], [{**each, **asked} for each in MANY])
        with pytest.raises(ValueError, match="adjusted"):
            device[0].draw(rows, torch.zeros(3, runner.num_logits), NUM_TOP)


NUM_SPARSE = 9
SPARSE: list[list[dict[str, Any]]] = [
    [{"temperature": 1.0}, {"temperature": 0.7, "seed": 5}, {"temperature": 0.0}],
    [{"temperature": 1.0, "top_k": 4}, {"temperature": 1.4, "top_p": 0.8}, {"temperature": 0.0}],
    [{"temperature": 1.0, **ADJUSTED[0]}, {"temperature": 1.0}, {"temperature": 0.8, "min_p": 0.3}],
]


def sparse_rows_of(rounds: list[int], many: list[dict[str, Any]]) -> list[DrawRow]:
    rows = adjusted_rows(rounds, many)
    for line, row in enumerate(rows):
        row.chain = (7 << 32) + line
    return rows


def single_samples(runner: ModelRunner, rows: list[DrawRow]) -> list[list[DraftSample | None]]:
    """The same draws, each from a prefill of its own and by the sampler on the CPU."""
    sampler, drawn = Sampler(runner.vocab_size, "cpu"), list[list[DraftSample | None]]()
    for line, (row, prompt) in enumerate(zip(rows, PROMPTS, strict=True)):
        output, samples = list[int](), list[DraftSample | None]()
        for _ in range(row.num_rounds):
            tokens = [*prompt, *output]
            context = RowContext(row.rule.params, len(tokens), len(prompt), TokenHistory(prompt), tuple(output))
            [sample] = sampler.draft_sample(logits_of(runner, tokens, line), [context], NUM_SPARSE, [row.chain])
            assert sample is not None
            samples.append(sample)
            output.append(sample.token_id)
        drawn.append(samples)
    return drawn


@pytest.mark.parametrize("many", SPARSE, ids=["plain", "cuts", "penalties"])
def test_draws_for_rejection_verification_are_those_of_single_steps_with_their_distributions(
    many: list[dict[str, Any]], runner: ModelRunner, device: tuple[DeviceDrawing, Captures]
) -> None:
    rows = sparse_rows_of([4, 4, 3], many)
    expected = single_samples(runner, rows)
    logits = torch.cat([logits_of(runner, prompt, line) for line, prompt in enumerate(PROMPTS)])
    assert device[0].draw_sparse(rows, logits, NUM_SPARSE) == expected
    assert device[0].num_passes == 3
    assert device[1].num_replayed == 1
    device[0]._can_capture = False
    device[0]._graphs.clear()
    assert device[0].draw_sparse(rows, logits, NUM_SPARSE) == [samples[:1] for samples in expected]


def test_how_many_are_drawn_for_rejection_verification_does_not_depend_on_what_is_drawn(
    runner: ModelRunner, device: tuple[DeviceDrawing, Captures]
) -> None:
    device[0]._mean_used = 1.0
    many = [{**each, "stop_token_ids": tuple(range(131)), "temperature": 1.0} for each in MANY]
    rows = sparse_rows_of([8, 5, 2], many)
    for row in rows:
        row.least_path_score, row.ends_all = 1.1, True
    logits = torch.cat([logits_of(runner, prompt, line) for line, prompt in enumerate(PROMPTS)])
    assert [len(each) for each in device[0].draw_sparse(rows, logits, NUM_SPARSE)] == [8, 5, 2]


def test_a_row_that_is_not_finite_has_no_sample_and_harms_no_other(
    runner: ModelRunner, device: tuple[DeviceDrawing, Captures]
) -> None:
    for spoiled, value in ((1, math.nan), (2, math.inf), (0, math.nan)):
        rows = sparse_rows_of([3, 3, 3], SPARSE[0])
        expected = single_samples(runner, rows)
        logits = torch.cat([logits_of(runner, prompt, line) for line, prompt in enumerate(PROMPTS)])
        logits[spoiled, 3] = value
        expected[spoiled] = [None]
        assert device[0].draw_sparse(rows, logits, NUM_SPARSE) == expected


def test_tokens_follow_the_distribution_that_is_told() -> None:
    """20,000 numbers of one row: chi-square with 5 degrees of freedom; a sound draw fails once in a million seeds."""
    num_draws, num_sparse = 20_000, 6
    logits = torch.tensor([[2.0, 1.0, -math.inf, 0.5, 0.5, -1.0, 1.7, -3.0]]).expand(num_draws, -1)
    numbers = np.array([uniform(11, 0, Purpose.DRAFT, t) for t in range(num_draws)])
    words = torch.from_numpy(sparse_rows(np.ones(num_draws), numbers))
    out = torch.zeros(num_draws, 2, 1 + num_sparse, dtype=torch.int32)
    launch_sparse(logits - 2.0, words, out)
    samples = read_sparse(out)
    first = samples[0]
    assert first is not None
    assert all(each is not None and (each.ids, each.probs) == (first.ids, first.probs) for each in samples)
    assert first.ids == (0, 6, 1, 3, 4, 5), "the likeliest, ties by rising id"
    drawn = Counter(each.token_id for each in samples if each is not None)
    expected = [num_draws * prob / sum(first.probs) for prob in first.probs]
    chi_square = sum((drawn[token] - mean) ** 2 / mean for token, mean in zip(first.ids, expected, strict=True))
    assert chi_square < 35.9


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
    assert num_prepared == 4 * len(ROUND_BUCKETS)
    for rounds in ([4, 3, 4], [3, 3, 3], [2, 1, 2], [8, 2, 1]):
        both(runner, drawing, rows_of(rounds, MANY))
    assert (captures.num_captured, captures.num_replayed) == (num_prepared, 4)


def test_graphs_are_prepared_within_the_memory_that_steps_have_left(
    device: tuple[DeviceDrawing, Captures], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing, captures = device
    monkeypatch.setattr(captures, "_bytes_each", 1 << 29)
    drawing.prepare(NUM_TOP)
    assert captures.num_captured == 3


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


def test_between_two_passes_are_four_launches(
    runner: ModelRunner, device: tuple[DeviceDrawing, Captures], monkeypatch: pytest.MonkeyPatch
) -> None:
    both(runner, device[0], rows_of([4, 4, 4], MANY))
    [(key, graph)] = device[0]._graphs.items()
    monkeypatch.setattr(device[0]._steps, "_forward", lambda batch, cache: torch.zeros(4, runner.num_logits))
    with LaunchCounter() as counter:
        graph.replay()
    names = [launch.name for launch in counter.launches]
    assert names == ["advance_kernel", "row_peak_kernel", "draw_kernel", "merge_kernel"] * (key[2] - 1)
