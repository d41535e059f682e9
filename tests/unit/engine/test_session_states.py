"""States of recurrent layers: how many a sequence holds, where snapshots are taken, and what a budget affords."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.engine.block_pool import BlockPool
from specdec.engine.engine import Engine
from specdec.engine.errors import ModelLoadError, ModelNotSupported, SequenceStateError
from specdec.engine.model.model_check import check_place
from specdec.engine.model.runner import ModelRunner
from specdec.engine.scheduler import Scheduler
from specdec.engine.sequence import Sequence
from specdec.engine.settings import EngineSettings
from specdec.engine.states.memory import CellShape, StateMemory, affordable_states
from specdec.engine.states.sessions import SessionStates
from specdec.engine.tree import TokenTree
from tests.support.engine.exact_runner import ExactRunner
from tests.support.engine.recurrent_models import RECURRENT, save_recurrent_model

BLOCK_SIZE = 4
PROMPT = list(range(1, 19))  # four blocks and a half
CELLS = [CellShape((3, 8), 8), CellShape((4, 16, 8), 120)]


class Bench:
    """An engine with states whose model ignores them."""

    def __init__(self, num_slots: int = 16, num_rows: int = 64) -> None:
        pool = BlockPool(32, BLOCK_SIZE)
        self.states = SessionStates(num_slots, num_rows, BLOCK_SIZE)
        self.engine = Engine(ExactRunner(32, BLOCK_SIZE), pool, Scheduler(pool, 64, 8, 96, self.states))

    def add(self, tokens: list[int], num_prompt_tokens: int | None = None, salt: bytes = b"") -> Sequence:
        """Add a sequence and compute its tokens."""
        seq = self.engine.add(tokens, num_prompt_tokens=num_prompt_tokens or len(tokens), cache_salt=salt)
        while self.engine.step():
            pass
        return seq

    def decode(self, seq: Sequence, tokens: list[int]) -> None:
        """Append final tokens one by one."""
        for token in tokens:
            self.engine.append(seq, [token])
            self.engine.finalize(seq, len(seq.token_ids))
            self.engine.step()

    @property
    def used(self) -> tuple[int, int]:
        """States and rows of kept inputs that sequences hold."""
        return self.states._slots.stats().used, self.states._rows.stats().used


def test_a_session_holds_at_most_two_states_however_much_is_drafted() -> None:
    bench = Bench()
    seq = bench.add(PROMPT)
    for _ in range(6):
        bench.engine.append(seq, [5])
        seq.tree = TokenTree(range(1, 13), [-1, 0, 1, 2, -1, 4, 5, 6, 7, -1, 9, 10])
        bench.engine.finalize(seq, len(seq.token_ids))
        bench.engine.step()
        assert bench.used[0] <= 2
        assert bench.used[1] >= 12
        bench.engine.accept(seq, [4, 5, 6])
        bench.engine.finalize(seq, len(seq.token_ids))
    bench.engine.free(seq)
    assert bench.used == (0, 0)


def test_rejected_nodes_hold_no_rows_while_their_session_waits() -> None:
    bench = Bench()
    waiting, other = bench.add(PROMPT), bench.add([*PROMPT[:5], 40])
    bench.engine.append(waiting, [5])
    waiting.tree = TokenTree(range(1, 13))
    bench.engine.step()
    assert bench.used[1] >= 12
    bench.engine.append(other, [6])
    bench.engine.step(only={other.seq_id})
    assert bench.used[1] < 6
    bench.engine.append(waiting, [7])
    output = bench.engine.step()
    assert output is not None
    assert [(item.start, item.num_new_tokens) for item in output.items] == [(len(PROMPT) + 1, 1)]


def test_a_rollback_keeps_the_state_and_computes_only_new_tokens() -> None:
    bench = Bench()
    seq = bench.add(PROMPT)
    bench.engine.append(seq, [7, 8, 9])
    bench.engine.step()
    bench.engine.rollback(seq, len(PROMPT) + 1)
    bench.engine.append(seq, [3])
    output = bench.engine.step()
    assert output is not None
    assert [(item.start, item.num_new_tokens) for item in output.items] == [(len(PROMPT) + 1, 1)]


def test_tokens_in_a_state_that_are_rolled_back_are_computed_again_without_it() -> None:
    """Rows are too few for the tokens, so that the state goes ahead of the final ones."""
    bench = Bench(num_rows=8)
    seq = bench.add(PROMPT)
    bench.engine.append(seq, list(range(30, 45)))
    bench.engine.step()
    held = bench.states.held(seq)
    assert held is not None
    assert held.num_tokens > seq.num_final_tokens
    bench.engine.rollback(seq, len(PROMPT) + 1)
    bench.engine.append(seq, [3])
    output = bench.engine.step()
    assert output is not None
    assert [item.start for item in output.items] == [16]  # the prompt's snapshot


def test_snapshots_are_at_ends_of_prompts_and_answers_and_where_prompts_part() -> None:
    bench = Bench()
    seq = bench.add(PROMPT)
    again = bench.add([*PROMPT, 40])
    assert again.num_cached_tokens == 16
    bench.decode(seq, [50, 51, 52, 53, 54, 55, 56])  # 25 tokens: the last whole block ends at 24
    answered = [*seq.token_ids, 60, 61]
    bench.engine.free(seq)
    assert bench.add(answered).num_cached_tokens == 24
    parted = [*PROMPT[:9], 70, 71, 72, 73]
    assert bench.add(parted).num_cached_tokens == 0  # no snapshot there yet
    assert bench.add([*parted[:10], 80, 81]).num_cached_tokens == 8
    assert bench.add([*PROMPT, 41], salt=b"other").num_cached_tokens == 0


def test_distrusted_snapshots_are_not_found_again() -> None:
    bench = Bench()
    seq = bench.add(PROMPT)
    bench.engine.distrust(seq)
    assert not any(bench.states._slots.find(digest) for digest in seq.block_digests)


def test_with_two_states_and_few_rows_every_session_ends() -> None:
    bench = Bench(num_slots=2, num_rows=8)
    sequences = [bench.engine.add(PROMPT[: 7 + n], num_prompt_tokens=7 + n) for n in range(5)]
    for _ in range(200):
        if bench.engine.step() is None:
            break
    assert all(seq.num_served_tokens == len(seq.token_ids) for seq in sequences)
    assert bench.engine.stats().preemptions > 0


def test_a_budget_pays_for_states_before_blocks_or_is_refused_by_name() -> None:
    limits = {"max_batch_seqs": 8, "max_batch_tokens": 64, "block_size": 16}
    sizes = affordable_states(CELLS, 1 << 30, **limits)
    assert sizes.num_slots == 2 * 8 + 64
    assert sizes.num_bytes == StateMemory(CELLS, sizes.num_slots, sizes.num_rows, "cpu").num_bytes  # type: ignore[arg-type]
    small = affordable_states(CELLS, 100_000, **limits)
    assert 2 <= small.num_slots < sizes.num_slots
    assert small.num_bytes <= 50_000
    with pytest.raises(ModelLoadError, match="kv_cache_memory_bytes: half of 10000 bytes"):
        affordable_states(CELLS, 10_000, **limits)
    assert affordable_states([], 1, **limits).num_bytes == 0


def test_an_engine_without_states_is_an_error(tmp_path: Path) -> None:
    directory = save_recurrent_model("lfm2", tmp_path)
    runner = ModelRunner.load(EngineSettings(model=str(directory), device="cpu", num_blocks=16, num_threads=2))
    pool = BlockPool(runner.num_blocks, runner.block_size)
    engine = Engine(runner, pool, Scheduler(pool, 64, 8, 64))
    engine.add(PROMPT, num_prompt_tokens=len(PROMPT))
    with pytest.raises(SequenceStateError, match="session_states"):
        engine.step()


@pytest.mark.parametrize(("device", "num_ranks"), [("cuda", 1), ("cpu", 2)])
def test_gpus_and_ranks_refuse_recurrent_layers_before_weights_are_read(device: str, num_ranks: int) -> None:
    for make in RECURRENT.values():
        with pytest.raises(ModelNotSupported, match="device cpu, tensor_parallel_size 1"):
            check_place(make(), device, num_ranks)
        check_place(make(), "cpu", 1)
