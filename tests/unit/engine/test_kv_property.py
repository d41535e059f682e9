"""After any sequence of operations, the next logits equal a fresh prefill's, and no block leaks."""

import tempfile
from array import array
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specdec.engine.batch import build_batch
from specdec.engine.block_pool import BlockPool
from specdec.engine.engine import Engine
from specdec.engine.errors import SequenceTooLong
from specdec.engine.model.runner import ModelRunner
from specdec.engine.outputs import StepOutput
from specdec.engine.scheduler import ScheduledItem, ScheduledStep, Scheduler
from specdec.engine.sequence import Sequence
from specdec.engine.settings import EngineSettings
from specdec.engine.states.plan import fresh_plan
from specdec.engine.states.sessions import NoStates, SequenceStates, SessionStates
from specdec.engine.tree import TokenTree
from tests.support.engine.exact_runner import (
    ExactRunner,
    assert_blocks_add_up,
    assert_states_add_up,
    evict_all,
    fresh_logits,
    prefix_contents,
)
from tests.support.engine.recurrent_models import RECURRENT, save_recurrent_model
from tests.support.engine.tiny_models import save_tiny_model

BLOCK_SIZE = 4
NUM_BLOCKS = 14
MAX_MODEL_LEN = 40
NUM_SLOTS, NUM_ROWS = 7, 24  # of recurrent states: too few for all sequences


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6)
paths = st.lists(st.integers(-1, 8), min_size=8, max_size=8)
picks = st.integers(0, 1 << 16)


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    """Chains, bushes and what lies between, of up to nine nodes."""
    tree = TokenTree()
    for _ in range(draw(st.integers(1, 9))):
        tree.add(draw(st.integers(-1, len(tree) - 1)), draw(st.integers(0, 2)))
    return tree


class KVMachine(RuleBasedStateMachine):
    """Roles that do everything the engine allows, in any order, in a pool too small for them."""

    draws_ahead = True

    def __init__(self) -> None:
        super().__init__()
        pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.runner = self.make_runner()
        self.engine = Engine(self.runner, pool, Scheduler(pool, 24, 4, MAX_MODEL_LEN, self.make_states()))
        self.seqs: list[Sequence] = []
        self.final_digests: set[bytes] = set()
        self.hashed_contents: dict[tuple[bytes, int], bytes] = {}

    def make_runner(self) -> Any:
        """The model that the engine drives."""
        return ExactRunner(NUM_BLOCKS, BLOCK_SIZE)

    def make_states(self) -> SequenceStates:
        """States of the model's recurrent layers."""
        return NoStates()

    def fresh_logits(self, token_ids: list[int]) -> torch.Tensor:
        """Logits of the last token of a sequence prefilled afresh."""
        return fresh_logits(token_ids)

    def check_contents(self) -> None:
        """Computed slots hold what a fresh prefill would write, and hashed blocks never change."""
        for seq in self.seqs:
            contents = b"".join(self.runner.block_contents(block) for block in seq.block_ids)
            assert contents.startswith(prefix_contents(tuple(seq.token_ids[: seq.num_computed_tokens])))
        digests = enumerate(self.engine.block_pool._digests)
        hashed = {(digest, block): self.runner.block_contents(block) for block, digest in digests if digest}
        for key, content in hashed.items():
            assert self.hashed_contents.get(key, content) == content
        self.hashed_contents = hashed

    def pick(self, pick: int) -> Sequence:
        return self.seqs[pick % len(self.seqs)]

    def note_final_tokens(self, seq: Sequence) -> None:
        """Remember what may be hashed from now on."""
        digests: list[bytes] = []
        num_full = seq.num_final_tokens // BLOCK_SIZE
        self.engine.block_pool.extend_digests(digests, seq.token_ids, seq.cache_salt, num_full)
        self.final_digests.update(digests)

    @initialize(own=tokens)
    def begin(self, own: list[int]) -> None:
        self.add([], own, b"", 0, False)

    @rule(
        blocks=st.lists(st.sampled_from([[1, 2, 1, 2], [2, 1, 2, 1]]), max_size=4),
        own=tokens,
        salt=st.sampled_from([b"", b"tenant"]),
        priority=st.integers(0, 1),
        prompt_logits=st.booleans(),
    )
    @precondition(lambda self: len(self.seqs) < 6)
    def add(self, blocks: list[list[int]], own: list[int], salt: bytes, priority: int, prompt_logits: bool) -> None:
        prompt = [*chain.from_iterable(blocks), *own]
        seq = self.engine.add(
            prompt,
            num_prompt_tokens=len(prompt),
            priority=priority,
            cache_salt=salt,
            prompt_logits=prompt_logits,
        )
        self.note_final_tokens(seq)
        self.seqs.append(seq)

    @rule(pick=picks, new=tokens)
    def append(self, pick: int, new: list[int]) -> None:
        seq = self.pick(pick)
        if len(seq.token_ids) + len(new) > MAX_MODEL_LEN:
            with pytest.raises(SequenceTooLong):
                self.engine.append(seq, new)
        else:
            self.engine.append(seq, new)

    @rule(pick=picks, tree=trees())
    def propose(self, pick: int, tree: TokenTree) -> None:
        self.pick(pick).tree = tree

    @rule(pick=picks, dropped=st.integers(0, 12))
    def roll_back(self, pick: int, dropped: int) -> None:
        seq = self.pick(pick)
        self.engine.rollback(seq, max(seq.num_final_tokens, len(seq.token_ids) - dropped))

    @rule(pick=picks, share=st.floats(0, 1))
    def finalize(self, pick: int, share: float) -> None:
        seq = self.pick(pick)
        speculative = len(seq.token_ids) - seq.num_final_tokens
        self.engine.finalize(seq, seq.num_final_tokens + round(share * speculative))
        self.note_final_tokens(seq)

    @rule(pick=picks)
    @precondition(lambda self: len(self.seqs) < 8)
    def fork(self, pick: int) -> None:
        self.seqs.append(self.engine.fork(self.pick(pick)))

    @rule(pick=picks)
    @precondition(lambda self: len(self.seqs) > 1)
    def free(self, pick: int) -> None:
        self.engine.free(self.seqs.pop(pick % len(self.seqs)))

    @rule(pick=picks, paused=st.booleans())
    def pause(self, pick: int, paused: bool) -> None:
        self.pick(pick).paused = paused

    @rule(pick=picks)
    def preempt(self, pick: int) -> None:
        self.engine.scheduler.preempt(self.pick(pick))

    @rule(pick=picks, new=tokens)
    def draw_ahead(self, pick: int, new: list[int]) -> None:
        """Compute tokens that nobody has appended."""
        seq = self.pick(pick)
        if seq.num_pending_tokens or not self.draws_ahead:
            return
        num_tokens = len(seq.token_ids)
        num_slots = self.engine.ahead.reserve(seq, min(len(new), MAX_MODEL_LEN - num_tokens))
        if num_slots:
            drawn = new[:num_slots]
            longer = replace(seq, token_ids=[*seq.token_ids, *drawn])
            step = ScheduledStep([ScheduledItem(longer, num_tokens, num_slots, 0, completes=True)])
            logits = self.runner.forward(build_batch(step, BLOCK_SIZE, "cpu")[0])
            assert torch.equal(logits[-1], self.fresh_logits(longer.token_ids))
            self.engine.ahead.hold(seq, drawn)

    @rule(pick=picks, num_tokens=st.integers(1, 3))
    def append_what_was_drawn(self, pick: int, num_tokens: int) -> None:
        seq = self.pick(pick)
        self.engine.append(seq, seq.ahead_token_ids[seq.num_pending_tokens :][:num_tokens])

    @rule(pick=picks)
    def take(self, pick: int) -> None:
        """Whatever was done to the sequence since, what it has pending is what was drawn, or is not known."""
        seq = self.pick(pick)
        if self.engine.ahead.is_known(seq):
            self.engine.ahead.take(seq)
            assert not seq.num_pending_tokens

    @rule(
        pick=picks,
        new=tokens,
        num_tokens=st.integers(1, 3),
        change=st.sampled_from(["nothing", "fork", "preempt", "evict", "release", "another token", "shorter", "step"]),
        token_id=st.integers(0, 2),
    )
    def draft_on(self, pick: int, new: list[int], num_tokens: int, change: str, token_id: int) -> None:
        """What a draft does, with something in between: draw, append, take."""
        self.step([], False)
        seq = self.pick(pick)
        self.draw_ahead(pick, new)
        if not seq.ahead_token_ids:
            return
        self.append_what_was_drawn(pick, num_tokens)
        match change:
            case "fork" if len(self.seqs) < 8:
                self.seqs.append(self.engine.fork(seq))
                self.engine.append(self.seqs[-1], [token_id] * (len(seq.token_ids) < MAX_MODEL_LEN))
            case "preempt":
                self.engine.scheduler.preempt(seq)
            case "evict":
                evict_all(self.engine.block_pool)
            case "release":
                self.engine.ahead.release()
            case "another token" if len(seq.token_ids) < MAX_MODEL_LEN:
                self.engine.append(seq, [token_id])
            case "shorter":
                self.engine.rollback(seq, max(seq.num_final_tokens, len(seq.token_ids) - num_tokens - token_id))
            case "step":
                self.engine.step()
        self.take(pick)
        if change == "fork":
            self.take(-1)
        if not seq.num_pending_tokens and len(seq.token_ids) < MAX_MODEL_LEN:
            self.engine.append(seq, [token_id])
            self.take(pick)

    @rule()
    def release(self) -> None:
        self.engine.ahead.release()
        assert not any(seq.ahead_token_ids for seq in self.seqs)

    @rule()
    def evict(self) -> None:
        evict_all(self.engine.block_pool)

    @rule(new=tokens, proposals=st.lists(trees(), max_size=3), choices=paths)
    def decode(self, new: list[int], proposals: list[TokenTree], choices: list[int]) -> None:
        """What roles do most: a token more for everyone, proposals for some, and a step."""
        for seq, token_id in zip(self.seqs, new, strict=False):
            if len(seq.token_ids) < MAX_MODEL_LEN:
                self.engine.append(seq, [token_id])
        for seq, tree in zip(self.seqs, proposals, strict=False):
            seq.tree = tree
        self.step(choices, False)

    @rule(choices=paths, forks=st.booleans())
    def step(self, choices: list[int], forks: bool) -> None:
        """One step; verified trees are then accepted along a random path, or left alone (which rejects all)."""
        tokens_before = {seq.seq_id: list(seq.token_ids) for seq in self.seqs}
        trees_before = {seq.seq_id: seq.tree for seq in self.seqs}
        output = self.engine.step()
        if output is None:
            assert not any(seq.is_ready and seq.num_pending_tokens for seq in self.seqs)
            return
        assert all(seq.token_ids == tokens_before[seq.seq_id] for seq in self.seqs)
        self.check_logits(output, trees_before)
        if forks:
            self.seqs.append(self.engine.fork(output.items[0].seq))
        for item, choice in zip(output.items, choices, strict=False):
            tree = trees_before[item.seq.seq_id]
            if tree is not None and 0 <= choice < item.tree_nodes:
                path = tree.path(choice)
                self.engine.accept(item.seq, path)
                expected = tokens_before[item.seq.seq_id] + [tree.token_ids[node] for node in path]
                assert item.seq.token_ids == expected

    @invariant()
    def no_block_leaks(self) -> None:
        assert_blocks_add_up(self.engine)

    @invariant()
    def only_final_tokens_are_hashed(self) -> None:
        assert {digest for digest in self.engine.block_pool._digests if digest} <= self.final_digests

    @invariant()
    def contents_are_right(self) -> None:
        self.check_contents()

    def check_logits(self, output: StepOutput, trees: dict[int, TokenTree | None]) -> None:
        """Every row of logits is that of a prefill of the row's own tokens."""
        seen = 0
        for item in output.items:
            seq = item.seq
            expected = []
            end = item.start + item.num_new_tokens
            first = item.start if seq.prompt_logits else end - min(1, item.num_new_tokens)
            if item.completes or seq.prompt_logits:
                expected = [seq.token_ids[: position + 1] for position in range(first, end)]
            tree = trees[seq.seq_id]
            if item.tree_nodes and tree is not None:
                paths = [tree.path(node) for node in range(item.tree_nodes)]
                expected += [seq.token_ids + [tree.token_ids[node] for node in path] for path in paths]
            got = output.logits[item.rows]
            assert len(got) == len(expected)
            seen += len(got)
            for logits, token_ids in zip(got, expected, strict=True):
                assert torch.equal(logits, self.fresh_logits(token_ids))
        assert seen == len(output.logits)

    def teardown(self) -> None:
        """From any state, all tokens get served, and freeing everything frees every block."""
        for seq in self.seqs:
            seq.paused = False
        for _ in range(200):
            if self.engine.step() is None:
                break
            assert_blocks_add_up(self.engine)
        else:
            raise AssertionError("the engine does not come to rest")
        assert all(seq.num_served_tokens == len(seq.token_ids) for seq in self.seqs)
        for seq in self.seqs:
            self.engine.free(seq)
        assert self.engine.block_pool.stats().used == 0


class ModelKVMachine(KVMachine):
    """The same over a real model. Its cache is that of all runs before, so that stale slots are everywhere."""

    def make_runner(self) -> Any:
        return tiny_model("llama")

    def fresh_logits(self, token_ids: list[int]) -> torch.Tensor:
        return fresh_model_logits("llama", tuple(token_ids))

    def check_contents(self) -> None:
        """Floats cannot be looked up; the logits tell."""


class RecurrentKVMachine(ModelKVMachine):
    """The same over a model with recurrent layers, with too few states and rows of kept inputs."""

    draws_ahead = False

    def make_runner(self) -> Any:
        return tiny_model("qwen3_next")

    def make_states(self) -> SequenceStates:
        self.states = SessionStates(NUM_SLOTS, NUM_ROWS, BLOCK_SIZE)
        return self.states

    def fresh_logits(self, token_ids: list[int]) -> torch.Tensor:
        return fresh_model_logits("qwen3_next", tuple(token_ids))

    @rule()
    def evict_snapshots(self) -> None:
        evict_all(self.states._slots)

    @invariant()
    def no_state_leaks(self) -> None:
        assert_states_add_up(self.states, self.seqs)

    def teardown(self) -> None:
        super().teardown()
        assert_states_add_up(self.states, [])


@cache
def tiny_model(name: str) -> ModelRunner:
    """A row-invariant random model, with blocks for the engine and others for fresh prefills."""
    num_blocks = NUM_BLOCKS + MAX_MODEL_LEN // BLOCK_SIZE
    with tempfile.TemporaryDirectory() as directory:
        save = save_recurrent_model if name in RECURRENT else save_tiny_model
        model = str(save(name, Path(directory)))
        options = EngineSettings(model=model, device="cpu", block_size=BLOCK_SIZE, num_blocks=num_blocks)
        runner = ModelRunner.load(options)
    assert runner.row_invariant
    return runner


@cache
def fresh_model_logits(name: str, token_ids: tuple[int, ...]) -> torch.Tensor:
    """Logits of the last token, prefilled in one piece in blocks that no engine uses."""
    blocks = range(NUM_BLOCKS, NUM_BLOCKS + -(-len(token_ids) // BLOCK_SIZE))
    seq = Sequence(seq_id=0, token_ids=list(token_ids), num_prompt_tokens=len(token_ids), block_ids=array("i", blocks))
    item = ScheduledItem(seq, 0, len(token_ids), 0, completes=True)
    batch, _ = build_batch(ScheduledStep([item]), BLOCK_SIZE, "cpu")
    batch.states = fresh_plan([0] * len(token_ids))
    return tiny_model(name).forward(batch)[0]


TestKV = KVMachine.TestCase
TestKV.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestKVOfARealModel = ModelKVMachine.TestCase
TestKVOfARealModel.settings = settings(TestKV.settings, max_examples=25, stateful_step_count=30)
TestKVOfARecurrentModel = RecurrentKVMachine.TestCase
TestKVOfARecurrentModel.settings = settings(TestKV.settings, max_examples=25, stateful_step_count=30)


@pytest.mark.long
class TestKVWithOtherExamplesInEveryRun(KVMachine.TestCase):
    """`make test-all` has the same examples in every run; a state that nobody thought of is found by others."""

    settings = settings(TestKV.settings, max_examples=3000, stateful_step_count=60, derandomize=False)
