"""The plugin for vLLM and a real draft service: proposals are the draft's own, through kills, freezes and exchanges."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from specdec_vllm import RemoteDraft
from tests.support.engine.dense_reference import Reference
from tests.support.services.faults import eventually
from tests.support.services.model_pair import ModelPair
from tests.support.services.one_service import running
from tests.support.vllm.played_engine import PlayedEngine, until_answered, vllm_config

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
VOCAB = 256
"""Tokens of the prompts: bytes."""


class Model:
    """The draft's model as transformers computes it, and a target that differs from it now and then."""

    def __init__(self, folder: Path) -> None:
        self._reference = Reference(folder)

    def draft_next(self, tokens: Sequence[int]) -> int:
        return int(self._reference.last_row(tuple(tokens)).argmax())

    def target_next(self, tokens: Sequence[int]) -> int:
        told = self.draft_next(tokens)
        return told if sum(tokens[-3:]) % 5 else (told + 1) % VOCAB

    def check(self, tokens: list[int], proposal: list[int]) -> None:
        for proposed in proposal:
            assert proposed == self.draft_next(tokens)
            tokens.append(proposed)


@pytest.fixture
def proposer(request: pytest.FixtureRequest) -> Iterator[list[RemoteDraft]]:
    """Holds what a test makes, and ends it."""
    made: list[RemoteDraft] = []
    yield made
    for one in made:
        one.close()


def played(
    model: Model, one: RemoteDraft, config: Any, num: int, max_tokens: int
) -> tuple[PlayedEngine, dict[str, Any]]:
    """An engine with requests, some of which begin alike, and their plain outputs."""
    engine = PlayedEngine(one.propose, model.target_next, config=config, check=model.check, unrest=0.1)
    rng, expected = random.Random(num), {}
    shared = [rng.randrange(VOCAB) for _ in range(20)]
    for index in range(num):
        prompt = shared[: 10 * (index % 3)] + [rng.randrange(VOCAB) for _ in range(4 + index)]
        engine.add(str(index), prompt, max_tokens)
        tokens = list(prompt)
        for _ in range(max_tokens):
            tokens.append(model.target_next(tokens))
        expected[str(index)] = tokens[len(prompt) :]
    return engine, expected


async def test_proposals_of_a_real_draft_are_its_own_while_drafts_are_frozen_and_killed(
    monkeypatch: pytest.MonkeyPatch, tiny_pair: ModelPair, tmp_path: Path, proposer: list[RemoteDraft]
) -> None:
    model, config = Model(tiny_pair.draft), vllm_config(vocab_size=4096, tokenizer=str(tiny_pair.target))
    async with AsyncExitStack() as stack:
        drafts = []
        for name in ("a", "b"):
            folder = tmp_path / name
            folder.mkdir()
            drafts.append(await stack.enter_async_context(running("draft", {"model": str(tiny_pair.draft)}, folder)))
        monkeypatch.setenv("SPECDEC_VLLM_DRAFTS", ",".join(draft.spec.address for draft in drafts))
        monkeypatch.setenv("SPECDEC_VLLM_STALL_S", "0.5")
        proposer.append(RemoteDraft(config))
        streams = proposer[0]._drafts.streams

        def num_ready() -> int:
            return sum(stream.is_ready for stream in streams.values())

        async def both() -> bool:
            return num_ready() == 2

        await eventually(both, "both drafts are ready")
        engine, expected = await asyncio.to_thread(played, model, proposer[0], config, 5, 40)
        assert await asyncio.to_thread(engine.play, until_answered(proposer[0])) == expected
        accepted = sum(request.num_accepted for request in engine.ended)
        assert accepted > 20

        pid = drafts[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            engine, expected = await asyncio.to_thread(played, model, proposer[0], config, 4, 30)
            assert await asyncio.to_thread(engine.play) == expected
        finally:
            os.kill(pid, signal.SIGCONT)
        drafts[1].kill()
        engine, expected = await asyncio.to_thread(played, model, proposer[0], config, 3, 30)
        assert await asyncio.to_thread(engine.play) == expected
        drafts[0].kill()
        engine, expected = await asyncio.to_thread(played, model, proposer[0], config, 2, 20)
        assert await asyncio.to_thread(engine.play) == expected

        async def neither() -> bool:
            return num_ready() == 0

        await eventually(neither, "the loss of both drafts is noticed")
