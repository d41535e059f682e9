"""vLLM's hook with scripted drafts: proposals are of their rows' tokens, and no fault of a draft changes the text."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from google.rpc import code_pb2, status_pb2

from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2
from specdec_vllm import RemoteDraft
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.model import identity, next_token
from tests.support.scripted.replica import ScriptedSession
from tests.support.services.faults import eventually
from tests.support.vllm.played_engine import PlayedEngine, until_answered, vllm_config

VOCAB = identity().vocab_size


@pytest.fixture(autouse=True)
def steps_wait_for_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a played engine take no time, so that no wait would ever be worth it."""
    monkeypatch.setattr("specdec_vllm.waits.HoldOffChoice.choose", lambda self, most: 4)
    monkeypatch.setenv("SPECDEC_VLLM_MAX_WAIT_MS", "300")


def draft_next(tokens: Sequence[int]) -> int:
    """The scripted draft's own next token."""
    return next_token(tokens, 0, 0, VOCAB)


def target_next(tokens: Sequence[int]) -> int:
    """A target that disagrees with the draft in a quarter of the positions."""
    told = draft_next(tokens)
    return told if sum(tokens[-3:]) % 4 else 3 + (told + 1) % (VOCAB - 3)


def plain(prompt: Sequence[int], num: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num):
        tokens.append(target_next(tokens))
    return tokens[len(prompt) :]


@asynccontextmanager
async def plugged(
    monkeypatch: pytest.MonkeyPatch, *drafts: ScriptedDraft, config: Any = None, **settings: Any
) -> AsyncIterator[RemoteDraft]:
    """A proposer with these drafts, which are started unless they have a port."""
    for draft in drafts:
        if not draft.port:
            await draft.start()
    monkeypatch.setenv("SPECDEC_VLLM_DRAFTS", ",".join(draft.address for draft in drafts))
    for name, value in settings.items():
        monkeypatch.setenv(f"SPECDEC_VLLM_{name.upper()}", str(value))
    proposer = RemoteDraft(config or vllm_config(vocab_size=VOCAB))
    try:
        yield proposer
    finally:
        await asyncio.to_thread(proposer.close)
        for draft in drafts:
            await draft.stop()


async def ready(proposer: RemoteDraft, num: int = 1) -> None:
    async def are_ready() -> bool:
        return sum(stream.is_ready for stream in proposer._drafts.streams.values()) == num

    await eventually(are_ready, f"{num} drafts are ready")


def check_row(tokens: list[int], proposal: list[int]) -> None:
    """A proposal is what the draft says after just these tokens."""
    for proposed in proposal:
        assert proposed == draft_next(tokens)
        tokens.append(proposed)


def engine(proposer: RemoteDraft, *, check: Callable[..., None] = check_row, **more: Any) -> PlayedEngine:
    return PlayedEngine(proposer.propose, target_next, config=vllm_config(vocab_size=VOCAB), check=check, **more)


def fill(played: PlayedEngine, num: int, seed: int, max_tokens: int = 40) -> dict[str, list[int]]:
    """Add requests, some with equal prompts, equal beginnings or equal ends; returns their plain outputs."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB) for _ in range(24)]
    expected = {}
    for index in range(num):
        own = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 30))]
        prompt = [own, shared + own, own + shared, shared, [own[0]] * 20 + shared][index % 5]
        played.add(str(index), prompt, max_tokens)
        expected[str(index)] = plain(prompt, max_tokens)
    return expected


@pytest.mark.parametrize("seed", [0, 1, 2])
async def test_every_proposal_is_the_drafts_for_its_rows_tokens_and_the_text_is_plain(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draft = ScriptedDraft()
    async with plugged(monkeypatch, draft) as proposer:
        await ready(proposer)
        played = engine(proposer, seed=seed)
        expected = fill(played, 12, seed)
        assert await asyncio.to_thread(played.play, until_answered(proposer)) == expected
        num_accepted = sum(request.num_accepted for request in played.ended)
        assert num_accepted > 100
        metrics = proposer.metrics.registry
        assert metrics.get_sample_value("specdec_vllm_accepted_tokens_total") == pytest.approx(num_accepted, rel=0.1)
        proposed = sum(request.num_proposed for request in played.ended)
        assert metrics.get_sample_value("specdec_vllm_proposed_tokens_total") == proposed
        assert metrics.get_sample_value("specdec_vllm_faults_total") == 0
        monkeypatch.setattr("specdec_vllm.drafts._IDLE_S", 0.0)
        await draft.until(lambda: len(draft.closed) >= 12)
        assert len(proposer._drafts.sessions) == 0


async def test_a_draft_that_dies_leaves_its_rows_to_another_and_one_that_comes_back_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = ScriptedDraft(), ScriptedDraft()
    loop = asyncio.get_running_loop()

    def disturb(step: int) -> None:
        if step < 20:
            answered(step)
        if step == 20:
            asyncio.run_coroutine_threadsafe(first.stop(), loop).result(10)
        if step == 60:
            asyncio.run_coroutine_threadsafe(first.start(), loop).result(10)

    with caplog.at_level(logging.INFO, "vllm.specdec"):
        async with plugged(monkeypatch, first, second) as proposer:
            await ready(proposer, 2)
            played, answered = engine(proposer), until_answered(proposer)
            expected = fill(played, 10, 5, max_tokens=120)
            assert await asyncio.to_thread(played.play, disturb) == expected
            await ready(proposer, 2)
            assert {one.split("-")[-1] for one, _, _ in first.opened} & {
                one.split("-")[-1] for one, _, _ in second.opened
            }
    lost = [record.getMessage() for record in caplog.records if "is not used" in record.getMessage()]
    assert len([line for line in lost if first.address in line]) == 1


async def test_a_draft_that_falls_silent_is_given_up_within_its_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    silent, other = ScriptedDraft(), ScriptedDraft()
    async with plugged(monkeypatch, silent, other, stall_s=1.5) as proposer:
        await ready(proposer, 2)
        played = engine(proposer)
        expected = fill(played, 6, 3, max_tokens=60)

        answered = until_answered(proposer)

        def disturb(step: int) -> None:
            if step < 10:
                answered(step)
            if step == 10:
                silent.make_proposal = lambda session: None

        assert await asyncio.to_thread(played.play, disturb) == expected

        async def is_given_up() -> bool:
            return any(f"{silent.address} is not used: no answer" in one.getMessage() for one in caplog.records)

        await eventually(is_given_up, "the silent draft is given up")
        assert not any(other.address in one.getMessage() and "not used" in one.getMessage() for one in caplog.records)


def lie_vocabulary(session: ScriptedSession) -> bytes:
    return pb.Proposal(start_position=len(session.token_ids), token_ids=[VOCAB + 5]).SerializeToString()


def lie_tree(session: ScriptedSession) -> bytes:
    return pb.Proposal(start_position=len(session.token_ids), token_ids=[5, 6], parents=[1, 0]).SerializeToString()


def lie_bytes(_session: ScriptedSession) -> bytes:
    return b"\xff\xff\xff"


def lie_size(session: ScriptedSession) -> bytes:
    return pb.Proposal(start_position=len(session.token_ids), token_ids=[5] * 65).SerializeToString()


@pytest.mark.parametrize("lie", [lie_vocabulary, lie_tree, lie_bytes, lie_size])
async def test_a_draft_that_sends_what_no_draft_sends_is_given_up(
    monkeypatch: pytest.MonkeyPatch, lie: Callable[[ScriptedSession], bytes]
) -> None:
    liar = ScriptedDraft()
    liar.make_proposal = lie
    async with plugged(monkeypatch, liar) as proposer:
        await ready(proposer)
        played = engine(proposer)
        expected = fill(played, 5, 7)
        assert await asyncio.to_thread(played.play) == expected
        assert not sum(request.num_proposed for request in played.ended)
        await ready(proposer, 0)


async def test_wrong_tokens_and_positions_are_only_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = ScriptedDraft()

    def wrong(session: ScriptedSession) -> bytes:
        start = max(0, len(session.token_ids) + (len(session.session_id) + len(session.token_ids)) % 5 - 2)
        return pb.Proposal(start_position=start, token_ids=[7, 8, 9, 10]).SerializeToString()

    draft.make_proposal = wrong
    async with plugged(monkeypatch, draft, max_wait_ms=5) as proposer:
        await ready(proposer)
        played = engine(proposer, check=lambda tokens, proposal: None)
        expected = fill(played, 5, 8)
        assert await asyncio.to_thread(played.play) == expected


async def test_without_a_draft_vllm_decodes_on_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    draft = ScriptedDraft()
    await draft.start()
    await draft.stop()
    with caplog.at_level(logging.INFO, "vllm.specdec"):
        async with plugged(monkeypatch, draft) as proposer:
            played = engine(proposer)
            expected = fill(played, 4, 9)
            assert await asyncio.to_thread(played.play) == expected
            await asyncio.sleep(0.6)
    assert len([one for one in caplog.records if draft.address in one.getMessage()]) <= 1


@pytest.mark.parametrize(
    ("served", "tokenizer"), [({"tokenizer_digest": "other"}, "t1"), ({"vocab_size": VOCAB + 1}, None)]
)
async def test_a_draft_of_another_vocabulary_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, served: dict[str, Any], tokenizer: str | None
) -> None:
    monkeypatch.setattr("specdec_vllm.settings._digest", lambda name, revision: tokenizer)
    draft = ScriptedDraft(identity(**served))
    async with plugged(monkeypatch, draft) as proposer:

        async def is_told() -> bool:
            return any("is not used: its" in record.getMessage() for record in caplog.records)

        await eventually(is_told, "the draft is refused")
        played = engine(proposer)
        expected = fill(played, 2, 1)
        assert await asyncio.to_thread(played.play) == expected
        assert not draft.opened


async def test_a_draft_without_room_is_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_vllm.draft_stream._FULL_S", 0.05)
    draft = ScriptedDraft()
    draft.refuse = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="full")
    async with plugged(monkeypatch, draft) as proposer:
        await ready(proposer)
        played, answered = engine(proposer), until_answered(proposer)
        expected = fill(played, 3, 2, max_tokens=150)

        def disturb(step: int) -> None:
            if step == 30:
                draft.refuse = None
                time.sleep(0.1)  # beyond the time after which it is asked again
            if step > 32:
                answered(step)

        assert await asyncio.to_thread(played.play, disturb) == expected
        assert sum(request.num_accepted for request in played.ended) > 0


async def test_rows_beyond_the_drafts_context_or_vocabulary_are_decoded_plainly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft = ScriptedDraft(identity(max_model_len=60))
    async with plugged(monkeypatch, draft) as proposer:
        await ready(proposer)
        played = engine(proposer)
        expected = fill(played, 5, 4, max_tokens=80)
        strange = [VOCAB + 3, 5, 6]
        played.add("strange", strange, 20)
        expected["strange"] = plain(strange, 20)
        assert await asyncio.to_thread(played.play) == expected
        assert max(length for _, _, length in draft.opened) < 60


@pytest.mark.parametrize("known", [True, False])
async def test_a_draft_that_floods_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, known: bool
) -> None:
    draft = ScriptedDraft()

    def flood(session: ScriptedSession) -> bytes | None:
        proposal = draft.good_proposal(session)
        session_id = session.session_id if known else "other"
        result = draft_pb2.DraftResult(session_id=session_id, epoch=session.epoch, proposal=proposal or b"")
        assert session.stream is not None
        session.stream.send(draft_pb2.DraftResponse(results=[result] * (300 if known else 5000)))
        return proposal

    draft.make_proposal = flood
    async with plugged(monkeypatch, draft) as proposer:
        await ready(proposer)
        played = engine(proposer)
        expected = fill(played, 3, 6)
        assert await asyncio.to_thread(played.play) == expected
        await ready(proposer, 0)
    assert any("too many" in record.getMessage() for record in caplog.records)
