"""Heads over hidden states where a GPU is played: captured passes offer what the CPU's offer, and wait once a level."""

from __future__ import annotations

import gc
import math
import weakref
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.launches import LaunchCounter
from specdec.config.drafter_options import DFlashOptions, Eagle3Options, HeadOptions
from specdec.drafting.heads.methods.registry import load_head
from specdec.drafting.heads.session import Features, Head, HeadAsk
from specdec.drafting.heads.target import HeadTarget
from specdec.drafting.interface import Context, Offer, Room
from specdec.engine.batch import build_batch
from specdec.engine.block_pool import BlockPool
from specdec.engine.cuda import buckets
from specdec.engine.cuda import passes as graph_passes
from specdec.engine.cuda.passes import CudaCapture
from specdec.engine.engine import Engine
from specdec.engine.model import runner as runner_module
from specdec.engine.model.runner import ModelRunner
from specdec.engine.sampling.logit_processors import RowContext
from specdec.engine.sampling.sampler import Sampler
from specdec.engine.scheduler import ScheduledItem, ScheduledStep, Scheduler
from specdec.engine.sequence import Sequence
from specdec.engine.settings import EngineSettings
from specdec.engine.tap import HiddenTap
from specdec.wire.sampling_params import SamplingParams
from tests.support.engine.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.support.engine.triton_device import DEVICE
from tests.support.fake_cuda.device import FakeDevice
from tests.support.fake_cuda.install import fake_cuda
from tests.support.heads import checkpoints
from tests.support.heads.checkpoints import Sizes

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="there is a real one")

BLOCK_SIZE, NUM_BLOCKS, WIDTH, DEPTH = 4, 24, 64, 3
TAP = (0, 1, 2)
SIZES = Sizes(vocab=VOCAB_SIZE, target=WIDTH, draft=70)
HEADS: dict[str, tuple[type[HeadOptions], Callable[[], tuple[dict[str, Any], checkpoints.Tensors]]]] = {
    "eagle3": (Eagle3Options, lambda: checkpoints.eagle3(SIZES, norm_output=True, fc_norm=True)),
    "dflash": (DFlashOptions, lambda: checkpoints.dflash(SIZES)),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def device() -> Iterator[FakeDevice]:
    with pytest.MonkeyPatch.context() as patch, fake_cuda() as device:
        patch.setattr(buckets, "ROW_BUCKETS", (4, 8))
        patch.setattr(graph_passes, "_MOST_AHEAD_S", math.inf)  # played, captures take as long as the machine is busy
        patch.setattr(runner_module, "_WARMUP_ROWS", (2,))
        patch.setattr(runner_module, "_CHECKED_ROWS", (3, 7))  # of each bucket; larger steps are not replayed
        yield device


@dataclass(frozen=True, slots=True)
class Prepared:
    """A head whose passes are captured, which some tests share."""

    name: str
    head: Any
    target: HeadTarget
    launches: LaunchCounter
    """Of its preparation."""


@pytest.fixture(scope="module", params=HEADS)
def prepared(
    request: pytest.FixtureRequest, model: Path, device: FakeDevice, tmp_path_factory: pytest.TempPathFactory
) -> Prepared:
    target = target_of(model, "cuda:0")
    head = load(request.param, tmp_path_factory.mktemp("head"), target)
    with LaunchCounter() as launches:
        head.prepare()
    return Prepared(request.param, head, target, launches)


def target_of(model: Path, device: str) -> HeadTarget:
    settings = EngineSettings(
        model=str(model), device=device, dtype="float32", block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, self_test=False
    )
    runner = ModelRunner.load(settings)
    runner.warmup(captures=False)
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    engine = Engine(runner, pool, Scheduler(pool, 64, 8, 40))
    return HeadTarget(runner, engine, Sampler(runner.vocab_size, runner.device))


class Life:
    """Sessions that commit what a generator says, and what a head offers before each step."""

    def __init__(self, head: Head, target: HeadTarget, lengths: tuple[int, int] = (5, 2)) -> None:
        self._head, self._device = head, target.runner.device
        self._generator = torch.Generator().manual_seed(4)
        self._tokens = [self._drawn(length + 1) for length in lengths]
        self._sessions = [head.open(Context([], length)) for length in lengths]
        self._starts = [0, 0]
        self.offers: list[list[Offer | None]] = []

    def _drawn(self, number: int) -> list[int]:
        return torch.randint(1, VOCAB_SIZE, (number,), generator=self._generator).tolist()

    def step(self, *, temperature: float, is_chain: bool = False) -> None:
        asks = []
        for line, (session, tokens) in enumerate(zip(self._sessions, self._tokens, strict=True)):
            start, end = self._starts[line], len(tokens) - 1
            blocks = array("i", range(line * 10, line * 10 + 10))
            seq = Sequence(seq_id=line, token_ids=tokens, num_prompt_tokens=2, block_ids=blocks)
            self._head.forget(seq, start, end)
            states = torch.randn(end - start, len(self._head.layer_ids), WIDTH, generator=self._generator)
            session.take(seq, Features(start, states.to(self._device), tokens[start + 1 : end + 1]))
            params = SamplingParams(max_tokens=99, seed=line, temperature=temperature)
            row = RowContext(params, len(tokens), 2)
            asks.append(HeadAsk(session, row, Room(16, DEPTH, is_chain), is_chain, seq))
        self.offers.append(self._head.draft(asks))
        for line, tokens in enumerate(self._tokens):
            self._starts[line] = len(tokens) - 1
            tokens += self._drawn(1 + line * 2)


def load(name: str, folder: Path, target: HeadTarget) -> Head:
    kind, make = HEADS[name]
    files = checkpoints.save(folder, *make())
    layer_ids = TAP if kind is Eagle3Options else TAP[:2]
    options = kind(model=str(files), num_speculative_tokens=DEPTH, speculative_eagle_topk=2, layer_ids=layer_ids)  # type: ignore[call-arg]
    return load_head(options, target)


def live(life: Life) -> list[list[Offer | None]]:
    for temperature in (1.0, 0.0, 0.8):
        life.step(temperature=temperature)
    life.step(temperature=1.0, is_chain=True)
    return life.offers


def test_captured_passes_offer_what_those_of_a_cpu_offer(prepared: Prepared, model: Path, tmp_path: Path) -> None:
    on_cpu, head = target_of(model, "cpu"), prepared.head
    expected = live(Life(load(prepared.name, tmp_path, on_cpu), on_cpu))
    replays = head.passes.replays
    num_prepared = replays.num_graphs
    assert num_prepared == 2 * len(head.kinds), "all in both buckets"
    found = live(Life(head, prepared.target))
    assert not replays.has_failed
    check_same(found, expected)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_nobody_asks_any_more_is_gone_with_its_graphs(
    name: str, model: Path, device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "ROW_BUCKETS", (4,))
    target = target_of(model, "cuda:0")
    head: Any = load(name, tmp_path, target)
    head.prepare()
    assert target.runner.num_graphs
    left = [weakref.ref(part) for part in (head, head.model, head.cache)]
    gc.disable()  # as in an engine, which freezes what there is at its start
    try:
        del head
        assert [ref() for ref in left] == [None] * len(left)
    finally:
        gc.enable()
    assert target.runner.num_graphs == 0


def test_passes_that_are_too_large_and_captures_that_were_dropped_change_no_offer(
    model: Path, device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt has more rows than are captured, and deeper levels longer paths."""
    monkeypatch.setattr(buckets, "PATH_SLOTS_PER_ROW", 1)
    monkeypatch.setattr(buckets, "_MOST_GRAPHS", 2)
    on_cpu, on_device = target_of(model, "cpu"), target_of(model, "cuda:0")
    expected = live(Life(load("eagle3", tmp_path / "cpu", on_cpu), on_cpu, lengths=(30, 2)))
    head: Any = load("eagle3", tmp_path / "device", on_device)
    head.prepare()
    found = live(Life(head, on_device, lengths=(30, 2)))
    assert not head.passes.replays.has_failed
    assert head.passes.replays.num_graphs == 2
    check_same(found, expected)


def test_where_capturing_fails_a_heads_passes_run_as_they_are_and_steps_are_replayed(
    model: Path, device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu, on_device = target_of(model, "cpu"), target_of(model, "cuda:0")
    expected = live(Life(load("eagle3", tmp_path / "cpu", on_cpu), on_cpu))
    head: Any = load("eagle3", tmp_path / "device", on_device)

    def failing(capture: CudaCapture, run: Callable[[], torch.Tensor]) -> None:
        run()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(CudaCapture, "__call__", failing)
    head.prepare()
    found = live(Life(head, on_device))
    assert not head.passes.replays.num_graphs
    assert on_device.runner.row_edges
    check_same(found, expected)


def check_same(found: list[list[Offer | None]], expected: list[list[Offer | None]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one is not None
            assert other is not None
            assert (one.token_ids, one.parents) == (other.token_ids, other.parents)
            assert one.scores == pytest.approx(other.scores, rel=1e-3)


@pytest.mark.parametrize("prepared", ["eagle3"], indirect=True)
def test_a_level_is_two_copies_to_the_device_and_one_wait(prepared: Prepared, device: FakeDevice) -> None:
    life = Life(prepared.head, prepared.target)
    life.step(temperature=1.0)
    before = device.num_to_device, device.num_to_host, device.num_waits
    life.step(temperature=1.0)
    after = device.num_to_device, device.num_to_host, device.num_waits
    states = 2  # of the test's own
    num_to_device, num_to_host, num_waits = (now - then for now, then in zip(after, before, strict=True))
    assert num_to_host == DEPTH, "tokens of a level"
    assert num_waits - states <= DEPTH
    assert num_to_device - states == 1 + 2 * DEPTH - 1, "committed tokens, then rows and draws of each level"


def compiled(counter: LaunchCounter) -> set[tuple[str, str]]:
    return {(launch.name, f"{launch.constants} {launch.options}") for launch in counter.launches}


def test_no_draft_waits_for_a_kernel_to_be_compiled(prepared: Prepared) -> None:
    life = Life(prepared.head, prepared.target, lengths=(30, 2))  # the first is too long for a captured pass
    with LaunchCounter() as since:
        life.step(temperature=1.0)
        life.step(temperature=0.0)
    assert {name for name, _ in compiled(since)} >= {"plan_kernel", "draw_kernel"}
    assert compiled(since) <= compiled(prepared.launches)


def test_steps_with_a_tap_are_captured_before_the_first_request(
    model: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "ROW_BUCKETS", (4,))
    runner = target_of(model, "cuda:0").runner
    assert runner.replays is not None
    replays: Any = runner.replays
    assert replays.num_graphs == 0
    runner.capture_steps(TAP)
    num_graphs = replays.num_graphs
    assert num_graphs == 1
    runner.capture_steps(TAP)
    tokens = [5, 6, 7, 8]
    seq = Sequence(seq_id=0, token_ids=tokens, num_prompt_tokens=4, block_ids=array("i", range(4)))
    told = []
    for forward in (runner.forward, lambda batch: replays.forward(batch, runner._cache)):
        batch, _ = build_batch(ScheduledStep([ScheduledItem(seq, 0, 4, 0, completes=True)]), BLOCK_SIZE, runner.device)
        batch.tap = HiddenTap(TAP)
        logits = forward(batch)
        assert batch.tap.states is not None
        told.append((logits.cpu(), batch.tap.states.cpu()))
    for ours, theirs in zip(*told, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert replays.num_graphs == num_graphs, "none was captured for the step"
