"""What a gateway remembers of coordinators' words has bounds, whatever they say."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from specdec.gateway.upstream import vocabulary
from specdec.gateway.upstream.turns import Turns
from specdec.gateway.upstream.vocabulary import Vocabulary
from specdec.v1 import coordinator_pb2 as api


class Coordinator:
    """Names tokens at any length, and calls others special than those that it is asked for."""

    def __init__(self, num_bytes: int = 3) -> None:
        self._num_bytes = num_bytes
        self.asked: list[int] = []

    async def call(self, _method: str, request: Any) -> api.DetokenizeResponse:
        self.asked += request.token_ids
        texts = [b"%d" % token_id + b"x" * self._num_bytes for token_id in request.token_ids]
        return api.DetokenizeResponse(tokens=texts, special_token_ids=[*request.token_ids[:1], *range(900, 1000)])


async def test_tokens_are_asked_for_once_and_those_of_the_tokenizer_that_was_used_least_lately_are_dropped_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vocabulary, "_MOST_TOKENS", 100)
    known, one = Vocabulary(), Coordinator()
    for digest in ("a", "b", "a"):
        texts = await known.learn(one, digest, range(60))  # type: ignore[arg-type]
        assert texts.utf8(7) == b"7xxx"
        assert texts.is_special(0) and not texts.is_special(900)
    assert len(one.asked) == 120
    await known.learn(one, "c", range(10))  # type: ignore[arg-type]
    assert list(known._known) == ["a", "c"]


async def test_neither_many_tokenizers_nor_long_tokens_fill_the_memory() -> None:
    known, one = Vocabulary(), Coordinator(num_bytes=100_000)
    for number in range(200):
        texts = await known.learn(one, f"digest {number}", [number])  # type: ignore[arg-type]
        assert len(texts.utf8(number)) == 1024
    assert len(known._known) == 64


def test_a_coordinator_that_tells_ever_new_templates_is_told_of_a_few_times() -> None:
    turns = Turns([])
    with capture_logs() as logs:
        for number in range(100):
            turns.learn("one:1", f"template {number}")
    assert len(turns.templates) == len(logs) + 1 == 16
