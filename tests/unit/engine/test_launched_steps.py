"""Steps that are launched and collected later, over a model whose keys and values are digests."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from specdec.engine.engine import Engine
from specdec.engine.errors import SequenceStateError
from specdec.engine.outputs import StepOutput
from specdec.engine.runner import PassObserver
from specdec.engine.scheduler import ScheduledItem
from specdec.engine.sequence import Sequence
from specdec.engine.tree import TokenTree
from tests.support.engine.engine_steps import PROMPT, assert_next_logits_are_fresh, prefilled
from tests.support.engine.exact_runner import assert_blocks_add_up, fresh_logits
from tests.support.engine.late_device import LateDevice, late_exact_engine

NUM_SEEDS = 60


def pending(engine: Engine, prompt: list[int] = PROMPT) -> Sequence:
    return engine.add(prompt, num_prompt_tokens=len(prompt))


def test_a_launched_step_has_advanced_nothing_before_it_is_collected() -> None:
    engine, device = late_exact_engine()
    seq = pending(engine)
    assert engine.launch()
    assert (engine.is_done(), engine.num_launched_rows) == (False, 9)
    assert (seq.num_computed_tokens, seq.num_served_tokens) == (0, 0)
    output = engine.collect()
    assert engine.is_done()
    assert engine.num_launched_rows == 0
    assert (seq.num_computed_tokens, seq.num_served_tokens) == (9, 9)
    assert torch.equal(output.logits, fresh_logits(PROMPT)[None])
    assert device.num_padded == 1


def test_what_is_launched_is_known_to_be_done_without_being_collected() -> None:
    engine, _ = late_exact_engine()
    pending(engine)
    assert engine.launch()
    assert [engine.is_done() for _ in range(4)] == [False, False, True, True]
    engine.collect()


class Noting(PassObserver):
    def __init__(self, device: LateDevice) -> None:
        self.events: list[object] = []
        self._device = device

    def pass_chosen(self, sequences: list[Sequence]) -> None:
        self.events.append(("chosen", [seq.seq_id for seq in sequences], self._device.num_launched))

    def blocks_copied(self, pairs: list[tuple[int, int]]) -> None:
        self.events.append(("copied", len(pairs)))

    def pass_begins(self, items: list[ScheduledItem]) -> None:
        self.events.append(("begins", [item.seq.seq_id for item in items], self._device.num_launched))


def test_an_observer_is_told_of_a_pass_in_order_and_before_it_is_launched() -> None:
    engine, device = late_exact_engine()
    parent = prefilled(engine)
    child, observer, num_before = engine.fork(parent), Noting(device), device.num_launched
    engine.append(child, [7])
    assert engine.launch({child.seq_id}, observer)
    engine.collect()
    ids = [child.seq_id]
    assert observer.events == [("chosen", ids, num_before), ("copied", 1), ("begins", ids, num_before)]
    assert not engine.launch({child.seq_id}, observer)
    assert len(observer.events) == 3, "nothing could run"


def test_nothing_to_run_launches_nothing() -> None:
    engine, device = late_exact_engine()
    assert not engine.launch()
    with pytest.raises(SequenceStateError, match="no step is launched"):
        engine.collect()
    assert device.num_launched == 0


def test_no_step_is_launched_before_the_one_before_it_is_collected() -> None:
    engine, _ = late_exact_engine()
    pending(engine)
    assert engine.launch()
    with pytest.raises(SequenceStateError, match="not collected"):
        engine.launch()
    assert torch.equal(engine.collect().logits, fresh_logits(PROMPT)[None])


@pytest.mark.parametrize(
    "change",
    [
        lambda engine, seq: engine.append(seq, [5]),
        lambda engine, seq: engine.rollback(seq, len(seq.token_ids)),
        lambda engine, seq: engine.accept(seq, []),
        lambda engine, seq: engine.fork(seq),
    ],
    ids=["append", "rollback", "accept", "fork"],
)
def test_sequences_are_not_changed_while_a_step_is_computed(change: Callable[[Engine, Sequence], object]) -> None:
    engine, _ = late_exact_engine()
    seq = prefilled(engine)
    assert engine.launch()
    with pytest.raises(SequenceStateError, match="not collected"):
        change(engine, seq)
    engine.collect()
    assert_next_logits_are_fresh(engine, seq)


def test_blocks_of_a_sequence_freed_meanwhile_go_to_nobody_before_the_pass_is_over() -> None:
    engine, _ = late_exact_engine(num_blocks=4)
    seq = pending(engine)
    assert engine.launch()
    engine.free(seq)
    other = pending(engine, [8, 8, 8, 8, 8])
    assert engine.block_pool.num_free == 1
    assert engine.stats().blocks_used == 3
    with pytest.raises(SequenceStateError, match="was freed"):
        engine.free(seq)
    output = engine.collect()
    assert output.items == []
    assert engine.stats().blocks_used == 0
    assert_blocks_add_up(engine)
    output = engine.step() or pytest.fail("nothing ran")
    assert [item.seq for item in output.items] == [other]
    assert torch.equal(output.logits, fresh_logits([8, 8, 8, 8, 8])[None])


def test_nobody_finds_in_the_prefix_cache_what_was_computed_for_a_sequence_that_was_freed_meanwhile() -> None:
    """Nobody has looked at its logits: they may be no numbers."""
    engine, _ = late_exact_engine()
    seq = pending(engine)
    assert engine.launch()
    engine.free(seq)
    engine.collect()
    again = pending(engine)
    assert engine.step() is not None
    assert again.num_cached_tokens == 0


def test_whoever_gave_up_blocks_for_a_step_and_is_freed_meanwhile_is_told_of_no_more() -> None:
    engine, _ = late_exact_engine(num_blocks=4)
    loser = prefilled(engine, list(range(8)), priority=1)
    winner = engine.add(PROMPT, num_prompt_tokens=len(PROMPT))
    assert engine.launch()
    assert not loser.block_ids
    engine.free(loser)
    output = engine.collect()
    assert output.preempted == []
    assert [item.seq for item in output.items] == [winner]


def test_rows_are_those_of_each_sequence_when_one_between_them_was_freed_meanwhile() -> None:
    engine, _ = late_exact_engine()
    seqs = [prefilled(engine, [*PROMPT, number]) for number in range(3)]
    while engine.step() is not None:
        pass
    for seq in seqs:
        engine.append(seq, [1])
    seqs[1].tree = TokenTree([1, 2], [-1, -1])
    assert engine.launch()
    engine.free(seqs[1])
    output = engine.collect()
    assert [item.seq for item in output.items] == [seqs[0], seqs[2]]
    for item in output.items:
        assert torch.equal(output.logits[item.rows], fresh_logits(item.seq.token_ids)[None])
    assert [item.batch_rows for item in output.items] == [slice(0, 1), slice(4, 5)]


def test_a_pass_that_raises_advances_nobody_and_all_are_computed_anew() -> None:
    engine, device = late_exact_engine()
    seqs = [prefilled(engine, [*PROMPT, number]) for number in range(3)]
    while engine.step() is not None:
        pass
    for seq in seqs:
        engine.append(seq, [1])

    def broken(_batch: object) -> None:
        raise ZeroDivisionError

    device.before_compute = broken
    lengths = [seq.num_computed_tokens for seq in seqs]
    assert engine.launch()
    engine.free(seqs[1])
    with pytest.raises(ZeroDivisionError):
        engine.collect()
    assert [seq.num_computed_tokens for seq in seqs] == lengths
    device.before_compute = lambda batch: None
    assert set(engine.abandon_step()) == set(seqs)
    assert engine.stats().blocks_used == 0
    assert_blocks_add_up(engine)
    for seq in (seqs[0], seqs[2]):
        assert_next_logits_are_fresh(engine, seq)


class Scene:
    """What roles do, at random, over a device; everything that comes out is held against fresh prefills."""

    def __init__(self, seed: int, *, is_threaded: bool) -> None:
        self.rng = rng = random.Random(seed)
        self.engine, self.device = late_exact_engine(
            num_blocks=rng.choice((12, 16, 32)), max_batch_tokens=rng.choice((6, 16, 64)), max_batch_seqs=5
        )
        self.device.num_looks = lambda: rng.randrange(5)
        self.device.is_threaded = is_threaded
        self.seqs: list[Sequence] = []
        self.num_rows = self.num_freed = 0

    def come_and_go(self) -> None:
        """What may happen at any time, a launched step or not."""
        rng = self.rng
        if len(self.seqs) < 6 and rng.random() < 0.5:
            prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 24))]
            seq = self.engine.add(prompt, num_prompt_tokens=len(prompt), priority=rng.randrange(2))
            self.seqs.append(seq)
        if self.seqs and rng.random() < 0.25:
            self.engine.free(self.seqs.pop(rng.randrange(len(self.seqs))))
            self.num_freed += 1
        for seq in self.seqs:
            seq.paused = rng.random() < 0.1

    def turn(self) -> None:
        self.come_and_go()
        for seq in self.seqs:
            if not seq.num_pending_tokens and len(seq.token_ids) < 60:
                self.engine.append(seq, [self.rng.randrange(3)])
                if self.rng.random() < 0.6:
                    seq.tree = self.tree()
        trees = {seq.seq_id: seq.tree for seq in self.seqs}
        if not self.engine.launch():
            return
        while self.rng.random() < 0.7:
            self.come_and_go()
            self.engine.is_done()
        output = self.engine.collect()
        self.check(output, trees)
        assert_blocks_add_up(self.engine)
        for item in output.items:
            tree = item.seq.verified_tree
            if tree is not None and self.rng.random() < 0.7:
                self.engine.accept(item.seq, tree.path(self.rng.randrange(item.tree_nodes)))
            if self.rng.random() < 0.5:
                self.engine.finalize(item.seq, len(item.seq.token_ids))

    def tree(self) -> TokenTree:
        tree = TokenTree()
        for _ in range(self.rng.randrange(1, 7)):
            tree.add(self.rng.randrange(-1, len(tree)), self.rng.randrange(3))
        return tree

    def check(self, output: StepOutput, trees: dict[int, TokenTree | None]) -> None:
        for item in output.items:
            assert item.seq in self.seqs
            if not item.completes:
                continue
            tree, token_ids = trees[item.seq.seq_id], item.seq.token_ids
            expected = [token_ids] if item.num_new_tokens else []
            if tree is not None:
                for node in range(item.tree_nodes):
                    expected.append([*token_ids, *(tree.token_ids[each] for each in tree.path(node))])
            rows = output.logits[item.rows]
            assert len(rows) == len(expected)
            for row, tokens in zip(rows, expected, strict=True):
                assert torch.equal(row, fresh_logits(tokens))
            self.num_rows += len(rows)


@pytest.mark.parametrize("is_threaded", [False, True], ids=["when looked at", "on a thread"])
def test_whatever_comes_and_goes_meanwhile_rows_are_those_of_fresh_prefills(is_threaded: bool) -> None:
    scenes = [Scene(seed, is_threaded=is_threaded) for seed in range(NUM_SEEDS)]
    for scene in scenes:
        for _ in range(40):
            scene.turn()
        for seq in scene.seqs:
            scene.engine.free(seq)
        assert scene.engine.stats().blocks_used == 0
    assert sum(scene.num_rows for scene in scenes) > 50 * NUM_SEEDS
    assert sum(scene.num_freed for scene in scenes) > 5 * NUM_SEEDS
    assert sum(scene.device.num_padded for scene in scenes) > 10 * NUM_SEEDS
    assert sum(scene.engine.scheduler.counters.preemptions for scene in scenes) > NUM_SEEDS


def test_a_runner_that_computes_at_once_is_collected_at_once() -> None:
    engine, device = late_exact_engine()
    engine.launch_pass = None
    seq = pending(engine)
    assert engine.launch()
    assert engine.is_done()
    assert torch.equal(engine.collect().logits, fresh_logits(PROMPT)[None])
    assert device.num_launched == 0
    assert_next_logits_are_fresh(engine, seq)


def test_a_device_is_asked_for_one_pass_at_a_time_by_whoever_steps() -> None:
    engine, device = late_exact_engine()
    assert isinstance(device, LateDevice)
    seq = prefilled(engine)
    assert_next_logits_are_fresh(engine, seq)
    assert device.num_launched > 1
