"""Parts of the plugin for vLLM: settings, offers, waits, ranks, and an interface of vLLM that has changed."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.v1 import common_pb2 as pb
from specdec.wire.tokenizer_files import tokenizer_digest
from specdec_vllm import RemoteDraft
from specdec_vllm.offers import BadOffer, read_offer
from specdec_vllm.rows import RowSessions
from specdec_vllm.settings import WrongSettings, read_engine, read_settings
from specdec_vllm.waits import NOTHING, Waits
from tests.support.for_each import for_each
from tests.support.vllm.played_engine import vllm_config

VOCAB = 100


@pytest.fixture
def one_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_VLLM_DRAFTS", "127.0.0.1:1")


@pytest.mark.parametrize(
    ("name", "value"),
    [("DRAFTS", None), ("DRAFTS", ""), ("DRAFTS", "host"), ("MAX_WAIT_MS", "-1"), ("METRICS_PORT", "x")],
)
def test_a_wrong_setting_is_one_line_that_names_it(
    monkeypatch: pytest.MonkeyPatch, one_draft: None, name: str, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv(f"SPECDEC_VLLM_{name}")
    else:
        monkeypatch.setenv(f"SPECDEC_VLLM_{name}", value)
    with pytest.raises(WrongSettings) as caught:
        RemoteDraft(vllm_config())
    assert f"SPECDEC_VLLM_{name}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_addresses_and_names_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_VLLM_DRAFTS", "a:1, dns:///drafts:2")
    assert read_settings().drafts == ("a:1", "dns:///drafts:2")


def test_a_configuration_of_another_form_is_refused_at_the_start(one_draft: None) -> None:
    with pytest.raises(WrongSettings, match="does not know this version of vLLM"):
        RemoteDraft(SimpleNamespace(speculative_config=None))


def test_arguments_of_another_form_cost_the_proposals_only(one_draft: None, caplog: pytest.LogCaptureFixture) -> None:
    proposer = RemoteDraft(vllm_config())
    assert proposer.propose([[1], [2]], 3, np.zeros(5)) == [[], []]
    assert proposer.propose([[1]], [1, 2], np.zeros((0, 4), np.int32)) == [[]]
    assert len([one for one in caplog.records if "no proposals for" in one.getMessage()]) == 1
    proposer.close()


def test_the_tokenizer_of_a_folder_is_known_by_its_content(tmp_path: Path) -> None:
    text = json.dumps({"model": {"vocab": {"a": 0}}})
    (tmp_path / "tokenizer.json").write_text(text)
    assert read_engine(vllm_config(tokenizer=str(tmp_path))).tokenizer_digest == tokenizer_digest(text)
    assert read_engine(vllm_config(tokenizer="no/such-model")).tokenizer_digest is None


def offer(**fields: Any) -> Any:
    return read_offer(pb.Proposal(**fields).SerializeToString(), VOCAB)


def test_the_likeliest_chain_follows_committed_tokens_through_a_tree() -> None:
    #        5(90) -> 6(200) -> 8
    #        9(250)          -> 7(50) below 6's parent
    found = offer(
        start_position=4, token_ids=[5, 9, 6, 7, 8], parents=[-1, -1, 0, 0, 2], scores=bytes([90, 250, 200, 50, 100])
    )
    assert found.chain([], 5) == [9]
    assert found.chain([5], 5) == [6, 8]
    assert found.chain([5], 1) == [6]
    assert found.chain([5, 7], 5) == []
    assert found.chain([5, 8], 5) is None
    assert found.chain([4], 5) is None


def test_a_proposal_without_parents_is_a_chain() -> None:
    found = offer(start_position=4, token_ids=[5, 6, 7], is_complete=True)
    assert (found.chain([], 9), found.chain([5, 6], 9), found.is_complete) == ([5, 6, 7], [7], True)
    assert offer(start_position=4).chain([], 9) == []


@for_each(
    "fields",
    [
        {"token_ids": [VOCAB]},
        {"token_ids": [2**32 - 1]},
        {"token_ids": [1] * 65},
        {"token_ids": [1, 2], "parents": [-1]},
        {"token_ids": [1, 2], "parents": [-1, 1]},
        {"token_ids": [1, 2], "parents": [-2, 0]},
        {"token_ids": [1, 2], "parents": [-1, 2**31 - 1]},
    ],
)
def test_an_impossible_proposal_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadOffer):
        offer(**fields)


@settings(deadline=None)
@given(st.binary(max_size=300), st.lists(st.integers(0, VOCAB), max_size=4))
def test_hostile_proposals_are_refused_or_give_tokens_of_the_vocabulary(data: bytes, following: list[int]) -> None:
    with suppress(BadOffer):
        chain = read_offer(data, VOCAB).chain(following, 5)
        assert chain is None or (len(chain) <= 5 and all(0 <= token < VOCAB for token in chain))


def row(*tokens: int) -> Any:
    found = np.full(600, -1, np.int32)
    found[: len(tokens)] = tokens
    return found


def test_rows_with_equal_ends_and_lengths_are_told_apart() -> None:
    sessions = RowSessions("o")
    first, second = row(1, *range(40)), row(2, *range(40))
    held = [sessions.claim(first, 41), sessions.claim(second, 41)]
    for session, tokens in zip(held, (first, second), strict=True):
        session.take(tokens, 41)
    sessions.keep(held)
    assert [sessions.claim(tokens, 41) for tokens in (second, first)] == [held[1], held[0]]


def test_equal_rows_have_sessions_of_their_own_and_long_ones_keep_all_tokens() -> None:
    sessions = RowSessions("o")
    tokens = row(*range(500))
    first, second = sessions.claim(tokens, 300), sessions.claim(tokens, 300)
    assert first is not second
    for session in (first, second):
        session.take(tokens, 300)
    sessions.keep([first, second])
    again = sessions.claim(tokens, 300)
    again.take(tokens, 500)
    sessions.keep([again])
    assert again.tokens[:500].tolist() == list(range(500))
    assert sessions.claim(tokens, 500) is again
    sessions.drop(second)
    assert sessions.claim(tokens, 300) not in (first, second)


def play(
    waits: Waits, *, answer_s: float, gain: float, cost_s: float = 0.0, num_rows: int = 1, num: int = 1000
) -> dict[int, int]:
    """Steps whose drafts answer after `answer_s`; returns how often each depth was chosen.

    `gain`: tokens that a chain in time gives each row. `cost_s`: of the verification of a row's proposal.
    """
    now_s, counts, drafted = 0.0, {NOTHING: 0, 0: 0, 2: 0, 4: 0}, 0.0
    for _ in range(num):
        depth = waits.begin(now_s, num_rows, num_rows * (1 + drafted), 5)
        counts[depth] += 1
        waited_s = 0.0
        if depth > 0:
            bound_s = waits.bound_s(depth)
            waited_s = min(answer_s, bound_s)
            waits.waited(depth, waited_s, is_in_time=answer_s <= bound_s)
        is_proposed = depth != NOTHING and answer_s <= waited_s
        drafted = gain if is_proposed else 0.0
        now_s += 0.01 + waited_s + is_proposed * num_rows * cost_s
    return counts


def test_steps_wait_for_drafts_that_are_worth_it_and_for_no_others() -> None:
    counts = play(Waits(0.05), answer_s=0.004, gain=3)
    assert counts[2] + counts[4] > 850
    counts = play(Waits(0.05), answer_s=0.04, gain=1)
    assert counts[2] + counts[4] < 300
    waits = Waits(0.05)
    counts = play(waits, answer_s=1.0, gain=3)
    assert counts[2] + counts[4] < 300
    assert waits.bound_s(2) <= 0.05


def test_rows_get_no_proposals_while_their_verification_costs_more_than_it_gains() -> None:
    # One row gains 40 % of its tokens for 20 % of its time, eight the same for 160 %.
    waits = Waits(0.05)
    assert play(waits, answer_s=0.0, gain=0.4, cost_s=0.002)[NOTHING] < 150
    counts = play(waits, answer_s=0.0, gain=0.4, cost_s=0.002, num_rows=8)
    assert counts[NOTHING] > 850
    assert play(waits, answer_s=0.0, gain=0.4, cost_s=0.002)[NOTHING] < 100


class Group:
    """vLLM's group, of two ranks in one process."""

    def __init__(self, rank: int, told: list[Any]) -> None:
        self.rank_in_group = rank
        self._told = told

    def broadcast_object(self, value: Any, src: int) -> Any:
        assert src == 0
        if self.rank_in_group == 0:
            self._told.append(value)
            return value
        assert value is None
        return self._told[-1]


def test_all_ranks_propose_what_the_first_one_does(monkeypatch: pytest.MonkeyPatch, one_draft: None) -> None:
    module: Any = ModuleType("vllm.distributed.parallel_state")
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", module)
    config, told = vllm_config(), []
    config.parallel_config.tensor_parallel_size = 2
    ranks = []
    for rank in (0, 1):
        group = Group(rank, told)
        module.get_tp_group = lambda group=group: group
        ranks.append(RemoteDraft(config))
    monkeypatch.setattr(ranks[0], "_propose", lambda *arguments: [[1, 2], []])
    arguments = ([[1], [2]], np.array([3, 4]), np.zeros((2, 9), np.int32))
    assert [one.propose(*arguments) for one in ranks] == [[[1, 2], []]] * 2
    assert not hasattr(ranks[1], "_drafts")
    ranks[0].close()
