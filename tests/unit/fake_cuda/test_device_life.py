"""The very code that a GPU runs, from loading to graphs of several tokens, on one that is played: late, and strict."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from bench.launches import LaunchCounter
from specdec.engine.batch import Batch, build_batch
from specdec.engine.block_pool import BlockPool
from specdec.engine.drawing import device as drawing_module
from specdec.engine.drawing.device import DeviceDrawing
from specdec.engine.drawing.rows import Draw, DrawRow, DrawRule
from specdec.engine.engine import Engine
from specdec.engine.model.runner import ModelRunner
from specdec.engine.sampling.logit_processors import RowContext
from specdec.engine.sampling.restrictions import masked_logits
from specdec.engine.sampling.sampler import Sampler
from specdec.engine.sampling.token_history import TokenHistory
from specdec.engine.scheduler import ScheduledItem, ScheduledStep, Scheduler
from specdec.engine.sequence import Sequence
from specdec.wire.sampling_params import SamplingParams
from tests.support.engine.triton_device import DEVICE, specialization
from tests.support.fake_cuda.device import FakeDevice, unwrapped
from tests.support.fake_cuda.install import fake_cuda
from tests.support.fake_cuda.runners import BLOCK_SIZE, BLOCKS_EACH, ROWS, warm_runner

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="there is a real one")

NUM_TOP = 3
PROMPTS = [[5, 6, 7], [9], [3, 1, 4, 1, 5]]


class Gpu(NamedTuple):
    device: FakeDevice
    runner: ModelRunner
    drawing: DeviceDrawing


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gpu]:
    with pytest.MonkeyPatch.context() as patch, fake_cuda() as device:
        patch.setattr(drawing_module, "ROUND_BUCKETS", (2, 3))
        runner = warm_runner("llama", tmp_path_factory.mktemp("model"), patch)
        assert runner.replays is not None
        sampler = Sampler(runner.vocab_size, runner.device)
        yield Gpu(device, runner, DeviceDrawing(runner.replays, runner.max_model_len, sampler))


def blocks_of(line: int) -> array[int]:
    return array("i", range(line * BLOCKS_EACH, (line + 1) * BLOCKS_EACH))


def batch_of(gpu: Gpu, prompts: dict[int, list[int]]) -> Batch:
    """The last token of each, on the device; those before it are computed by then."""
    items = []
    for line, ids in prompts.items():
        seq = Sequence(seq_id=line, token_ids=ids, num_prompt_tokens=len(ids), block_ids=blocks_of(line))
        items.append(ScheduledItem(seq, len(ids) - 1, 1, 0, completes=True))
    return build_batch(ScheduledStep(items), BLOCK_SIZE, gpu.runner.device)[0]


def prefill(gpu: Gpu, token_ids: list[int], line: int) -> torch.Tensor:
    """Logits of its last token, computed without a graph."""
    seq = Sequence(seq_id=line, token_ids=token_ids, num_prompt_tokens=len(token_ids), block_ids=blocks_of(line))
    item = ScheduledItem(seq, 0, len(token_ids), 0, completes=True)
    batch = build_batch(ScheduledStep([item]), BLOCK_SIZE, gpu.runner.device)[0]
    assert gpu.runner.replays is not None
    return gpu.runner.replays.forward(batch, gpu.runner._cache)


@pytest.mark.smoke
def test_a_model_is_loaded_proved_and_captured(gpu: Gpu) -> None:
    assert "float32/cuda/triton-decoder" in gpu.runner.numerics_id
    assert gpu.runner.row_edges == ROWS


def test_captured_steps_write_their_logits_to_one_buffer(gpu: Gpu) -> None:
    replays: Any = gpu.runner.replays
    logits = [graph.result for graph in replays._graphs.values()]
    assert len(logits) == len(ROWS)
    assert len({id(each.memory) for each in logits}) == 1


def greedy(gpu: Gpu, num_steps: int, *, is_launched: bool, freed_at: int | None) -> dict[str, list[int]]:
    """Tokens of sequences, of which one may be freed while a step is under way and another added then."""
    pool = BlockPool(3 * BLOCKS_EACH, BLOCK_SIZE)
    launch_pass = gpu.runner.launch if is_launched else None
    engine = Engine(gpu.runner, pool, Scheduler(pool, 64, 8, 40), launch_pass)
    sampler = Sampler(gpu.runner.vocab_size, gpu.runner.device)
    params = SamplingParams(max_tokens=100, seed=3, temperature=0.0)
    names = ["stays", "goes", "comes"]
    present = {name: engine.add(PROMPTS[i], num_prompt_tokens=len(PROMPTS[i])) for i, name in enumerate(names[:2])}
    for number in range(num_steps):
        assert engine.launch()
        if number == freed_at:
            assert engine.is_done() is not is_launched
            engine.free(present.pop("goes"))
            present["comes"] = engine.add(PROMPTS[2], num_prompt_tokens=len(PROMPTS[2]))
        output = engine.collect()
        contexts = [RowContext(params, len(item.seq.token_ids), 1) for item in output.items]
        rows = torch.tensor([item.rows.start for item in output.items]).to("cuda:0", non_blocking=True)
        tokens = sampler.sample(output.logits.index_select(0, rows), contexts)
        for item, token in zip(output.items, tokens, strict=True):
            assert token is not None
            engine.append(item.seq, [token])
    return {name: list(seq.token_ids) for name, seq in present.items()}


def test_who_comes_and_goes_while_a_step_is_under_way_changes_nobodys_tokens(gpu: Gpu) -> None:
    found = greedy(gpu, 4, is_launched=True, freed_at=1)
    undisturbed = greedy(gpu, 4, is_launched=False, freed_at=None)
    assert found["stays"] == undisturbed["stays"]
    expected = list(PROMPTS[2])
    while len(expected) < len(found["comes"]):
        expected.append(int(prefill(gpu, expected, 2)[0, :131].argmax()))
    assert found["comes"] == expected
    assert len(expected) == len(PROMPTS[2]) + 2


def test_a_step_reads_and_gives_what_it_did_when_it_was_launched_however_late_it_is(gpu: Gpu) -> None:
    expected = [prefill(gpu, prompt, line).cpu() for line, prompt in enumerate(PROMPTS)]
    first = gpu.runner.launch(batch_of(gpu, {0: PROMPTS[0], 1: PROMPTS[1]}))
    second = gpu.runner.launch(batch_of(gpu, {2: PROMPTS[2]}))
    third = gpu.runner.launch(batch_of(gpu, {1: PROMPTS[1], 2: PROMPTS[2], 0: PROMPTS[0]}))
    assert not third.is_done()
    assert second.gap_s() is None
    while not third.is_done():
        assert unwrapped(third.logits()).isnan().any(), "nothing is there yet"
    assert not unwrapped(third.logits()).isnan().any(), "looked at without waiting"
    torch.testing.assert_close(first.logits().cpu(), torch.cat([expected[0], expected[1]]))
    torch.testing.assert_close(second.logits().cpu(), expected[2])
    torch.testing.assert_close(third.logits().cpu(), torch.cat([expected[1], expected[2], expected[0]]))
    assert second.gap_s() == 1e-3


HARD: list[dict[str, Any]] = [
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "logit_bias": {7: 3.0, 9: -2.0}},
    {"min_tokens": 20, "eos_token_ids": (3, 4), "allowed_token_ids": tuple(range(0, 131, 2)), "bad_words": ((8,),)},
]


def test_a_step_is_one_copy_to_the_device_and_its_tokens_one_wait_whatever_adjusts_and_cuts_logits(gpu: Gpu) -> None:
    device, sampler = gpu.device, Sampler(gpu.runner.vocab_size, gpu.runner.device)
    contexts = [
        RowContext(SamplingParams(**{"max_tokens": 100, "seed": 3, **hard}), len(prompt), 1, TokenHistory(prompt))
        for hard, prompt in zip(HARD, PROMPTS, strict=True)
    ]
    masks = {1: np.full(5, 0xFFFFFFFF, np.uint32)}
    logits = [prefill(gpu, prompt, line).cpu() for line, prompt in enumerate(PROMPTS)]
    expected = Sampler(gpu.runner.vocab_size, "cpu").sample(masked_logits(torch.cat(logits), masks), contexts)
    device.default.run()
    before = device.num_to_host, device.num_waits, device.num_to_device
    batch = batch_of(gpu, dict(enumerate(PROMPTS)))
    assert device.num_to_device - before[2] == 1
    tokens = sampler.sample(masked_logits(gpu.runner.launch(batch).logits(), masks), contexts)
    assert tokens == expected
    assert (device.num_to_host - before[0], device.num_waits - before[1]) == (1, 1)


def test_tokens_that_are_drawn_behind_a_pass_are_those_of_the_pass_and_nobody_has_waited_for_them(gpu: Gpu) -> None:
    device, sampler = gpu.device, Sampler(gpu.runner.vocab_size, gpu.runner.device)
    contexts = [
        RowContext(SamplingParams(**{"max_tokens": 100, "seed": 3, **each}), len(prompt), 1, TokenHistory(prompt))
        for each, prompt in zip([HARD[0], HARD[1], {"temperature": 0.0}], PROMPTS, strict=True)
    ]
    logits = torch.cat([prefill(gpu, prompt, line).cpu() for line, prompt in enumerate(PROMPTS)])
    device.default.run()
    before = device.num_waits, device.default.num_run
    launched = gpu.runner.launch(batch_of(gpu, dict(enumerate(PROMPTS))))
    drawn = launched.behind(lambda logits: sampler.start(logits, contexts))
    assert (device.num_waits, device.default.num_run) == before
    assert device.default.end == launched.end._end, "the pass ends with what was launched behind it"
    assert drawn()() == Sampler(gpu.runner.vocab_size, "cpu").sample(logits, contexts)


def test_what_draws_tokens_is_compiled_before_the_first_request(gpu: Gpu) -> None:
    sampler = Sampler(gpu.runner.vocab_size, gpu.runner.device)
    with LaunchCounter() as before:
        sampler.compile()
    asked: list[list[dict[str, Any]]] = [PLAIN, ADJUSTED, HARD]
    asked += [[{"top_k": 3}] * 3, [{"top_p": 0.7}, *PLAIN[:2]], [{"min_p": 0.1}, {"top_k": 4}, {"top_p": 0.2}]]
    logits = torch.zeros(3, gpu.runner.num_logits, device="cuda:0")
    with LaunchCounter() as later:
        for many in asked:
            sampler.sample(logits, [row.context for row in rows_of([1, 1, 1], many)])
    assert len(later.launches) > 60
    assert set(map(specialization, later.launches)) <= set(map(specialization, before.launches))


def test_steady_steps_leave_no_memory_behind_and_take_the_same(gpu: Gpu) -> None:
    device, sampler = gpu.device, Sampler(gpu.runner.vocab_size, gpu.runner.device)
    rows = [row.context for row in rows_of([1, 1, 1], [HARD[1], HARD[0], PLAIN[2]])]
    prefill(gpu, PROMPTS[0], 0)
    gc.collect()  # what earlier tests left in circles would be freed in between
    taken = []
    for _ in range(4):
        before = device.num_allocated
        sampler.sample(gpu.runner.launch(batch_of(gpu, dict(enumerate(PROMPTS)))).logits(), rows)
        taken.append((device.num_allocated - before, device.num_held))
    assert taken[1] == taken[2] == taken[3]
    assert taken[1][0] > 0


def rows_of(rounds: list[int], many: list[dict[str, Any]]) -> list[DrawRow]:
    rows = []
    for line, (prompt, each, num_rounds) in enumerate(zip(PROMPTS, many, rounds, strict=True)):
        params = SamplingParams(**{"max_tokens": 100, "seed": 3, **each})
        row = DrawRow(DrawRule(params), line, len(prompt), num_rounds, blocks_of(line))
        if params.adjusts_logits:
            row.adjusting = RowContext(params, row.position, len(prompt), TokenHistory(prompt))
        rows.append(row)
    return rows


def single_steps(gpu: Gpu, rows: list[DrawRow]) -> list[list[Draw]]:
    """The same draws from prefills, by the sampler on the CPU."""
    sampler, drawn = Sampler(gpu.runner.vocab_size, "cpu"), list[list[Draw]]()
    for line, (row, prompt) in enumerate(zip(rows, PROMPTS, strict=True)):
        output, draws = list[int](), list[Draw]()
        for _ in range(row.num_rounds):
            tokens = [*prompt, *output]
            context = RowContext(row.rule.params, len(tokens), len(prompt), TokenHistory(prompt), tuple(output))
            [best] = sampler.candidates(prefill(gpu, tokens, line).cpu(), [context], NUM_TOP)
            draws.append(([each.token_id for each in best], [each.score for each in best]))
            output.append(best[0].token_id)
        drawn.append(draws)
    return drawn


PLAIN: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.6}]
ADJUSTED: list[dict[str, Any]] = [
    PLAIN[0],
    {**HARD[1], "top_k": 9},
    {**HARD[0], "min_tokens": 2, "eos_token_ids": (3,)},
]


@pytest.mark.parametrize(
    ("many", "num_copies"),
    [pytest.param(PLAIN, 1, id="plain", marks=pytest.mark.long), pytest.param(ADJUSTED, 2, id="adjusted and cut")],
)
def test_draws_of_a_graph_are_those_of_single_steps_every_time_for_one_copy_back(
    many: list[dict[str, Any]], num_copies: int, gpu: Gpu
) -> None:
    device, rows = gpu.device, rows_of([3, 2, 3], many)
    expected = single_steps(gpu, rows)
    for number in range(2):
        logits = torch.cat([prefill(gpu, prompt, line) for line, prompt in enumerate(PROMPTS)])
        device.default.run()
        before = device.num_to_host, device.num_waits, device.num_to_device
        drawn = gpu.drawing.draw(rows, logits, NUM_TOP)
        assert gpu.drawing.num_passes == 2
        assert [[ids for ids, _ in draws] for draws in drawn] == [[ids for ids, _ in draws] for draws in expected]
        if number:
            copies = device.num_to_host - before[0], device.num_waits - before[1], device.num_to_device - before[2]
            assert copies == (1, 1, num_copies)


def test_graphs_serve_inside_and_outside_of_inference_mode_wherever_they_were_captured(gpu: Gpu) -> None:
    replays = gpu.runner.replays
    assert replays is not None
    drawing = DeviceDrawing(replays, gpu.runner.max_model_len, Sampler(gpu.runner.vocab_size, gpu.runner.device))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replays.capture, "ahead_s", 1e9)
        drawing.prepare(NUM_TOP)
    assert drawing.num_graphs == 1, "that of the comparison with single steps"
    for prompt in PROMPTS[0], PROMPTS[2]:
        drawing.draw(rows_of([3, 2, 3], PLAIN)[:1], prefill(gpu, prompt, 0), NUM_TOP)
        assert drawing.num_passes == 2


def test_a_draft_that_transformers_runs_draws_several_tokens_in_a_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing_module, "ROUND_BUCKETS", (2,))
    with fake_cuda() as device:
        runner = warm_runner("gemma2", tmp_path, monkeypatch)
        assert runner.replays is not None
        drawing = DeviceDrawing(runner.replays, runner.max_model_len, Sampler(runner.vocab_size, runner.device))
        logits = runner.forward(batch_of(Gpu(device, runner, drawing), {0: PROMPTS[1]}))
        [row, *_] = rows_of([2, 2, 2], PLAIN)
        drawing.draw([replace(row, position=1)], logits, NUM_TOP)
        assert drawing.num_passes == 1


def test_memory_of_graphs_is_given_back_and_they_are_captured_again(gpu: Gpu) -> None:
    runner = gpu.runner
    before = torch.cuda.memory_reserved()
    runner.release_memory()
    assert (runner.num_graphs, torch.cuda.memory_reserved()) == (0, 0)
    runner.forward(batch_of(gpu, {0: PROMPTS[0]}))
    assert runner.num_graphs == 1
    assert 0 < runner.replays.capture.held_bytes == torch.cuda.memory_reserved() < before  # type: ignore[union-attr]


def test_sparse_draws_of_a_graph_wait_for_nothing_inside(gpu: Gpu) -> None:
    rows = rows_of([2, 2, 2], PLAIN)
    logits = torch.cat([prefill(gpu, prompt, line) for line, prompt in enumerate(PROMPTS)])
    contexts = [row.context for row in rows]
    first = Sampler(gpu.runner.vocab_size, "cpu").draft_sample(logits.cpu(), contexts, 5, [row.chain for row in rows])
    drawn = gpu.drawing.draw_sparse(rows, logits, 5)
    assert gpu.drawing.num_passes == 1
    assert [draws[0] for draws in drawn] == first
