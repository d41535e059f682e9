"""What a client gets is bounded, whatever there is to tell, and says all of it in order."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.coordinator.sessions.client_stream import ClientStream, prompt_chunks, prompt_end
from specdec.coordinator.text.detokenizer import DetokenizerFactory
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from tests.support.scripted.model import make_tokenizer

DETOKENIZERS = DetokenizerFactory(make_tokenizer())
MOST_BYTES = 320 * 1024
"""Far below the 4 MiB that clients take by default."""


def position(num_top: int) -> pb.PositionLogprobs:
    return pb.PositionLogprobs(logprob=-0.5, top=[pb.TokenLogprob(token_id=2**32 - 1, logprob=-1.5)] * num_top)


async def all_chunks(stream: ClientStream) -> list[api.GenerateResponse]:
    stream.close()
    chunks: list[api.GenerateResponse] = []
    while (chunk := await stream.take()) is not None:
        chunks.append(chunk)
    return chunks


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.text(max_size=40), st.integers(1, 3000)), min_size=1, max_size=6),
    st.one_of(st.none(), st.integers(0, 256)),
)
async def test_output_of_any_size_arrives_whole_in_bounded_chunks(
    pieces: list[tuple[int, str, int]], num_top: int | None
) -> None:
    stream = ClientStream()
    ids, text = count(3), ""
    sent: list[int] = []
    for num_tokens, some_text, times in pieces:
        token_ids = [3 + next(ids) % 200 for _ in range(num_tokens)]
        logprobs = [] if num_top is None else [position(num_top)] * num_tokens
        origins = [pb.ORIGIN_DECODE] * num_tokens
        stream.output(0, some_text * times, DETOKENIZERS, token_ids, origins, logprobs)
        sent += token_ids
        text += some_text * times
    chunks = await all_chunks(stream)
    assert all(chunk.ByteSize() <= MOST_BYTES * (1 if num_top is None else 2) for chunk in chunks)
    assert [token.id for chunk in chunks for token in chunk.delta.tokens] == sent
    assert "".join(chunk.delta.text for chunk in chunks) == text
    with_logprobs = [token.HasField("logprobs") for chunk in chunks for token in chunk.delta.tokens]
    assert all(with_logprobs) if num_top is not None else not any(with_logprobs)


@pytest.mark.parametrize(("num_top", "most_tokens"), [(None, 64), (0, 64), (20, 13), (256, 1)])
async def test_output_that_waits_is_merged_into_chunks_that_cost_their_reader_little(
    num_top: int | None, most_tokens: int
) -> None:
    stream = ClientStream()
    logprobs = [] if num_top is None else [position(num_top)]
    for _ in range(2):  # one token at a time, then all at once
        for _ in range(200):
            stream.output(0, "a", DETOKENIZERS, [5], [pb.ORIGIN_DECODE], logprobs)
        stream.output(0, "a", DETOKENIZERS, [5] * 200, [pb.ORIGIN_DECODE] * 200, logprobs * 200)
    chunks = await all_chunks(stream)
    assert max(len(chunk.delta.tokens) for chunk in chunks) == most_tokens
    assert sum(len(chunk.delta.tokens) for chunk in chunks) == 800


async def test_no_text_comes_before_the_tokens_that_it_is_of() -> None:
    stream = ClientStream()
    stream.output(0, "x" * 500_000, DETOKENIZERS, [5] * 1000, [pb.ORIGIN_DECODE] * 1000)
    chunks = await all_chunks(stream)
    num_tokens = 0
    for chunk in chunks:
        num_tokens += len(chunk.delta.tokens)
        assert not chunk.delta.text or num_tokens == 1000
    assert len(chunks) > 10


async def test_long_output_is_cut_as_it_is_taken_and_keeps_its_place() -> None:
    stream, asked = ClientStream(), list[int]()
    token_text = DETOKENIZERS.token_text
    counting: Any = SimpleNamespace(token_text=lambda token: asked.append(token) or token_text(token))
    origins = [pb.ORIGIN_DECODE] * 100_000
    stream.output(0, "before", counting, [4], origins[:1])
    stream.output(0, "long", counting, [5] * 100_000, origins, step=api.DecodingStep())
    stream.output(1, "after", counting, [6], origins[:1])
    assert len(asked) == 2
    first, second = await stream.take(), await stream.take()
    assert first is not None and first.delta.text == "before"
    assert second is not None and len(second.delta.tokens) == len(asked) - 2 < 100
    *chunks, texts, steps, last = await all_chunks(stream)
    assert sum(len(chunk.delta.tokens) for chunk in [second, *chunks]) == 100_000
    assert (texts.delta.text, len(steps.delta.steps)) == ("long", 1)
    assert (last.delta.index, last.delta.text, last.delta.tokens[0].id) == (1, "after", 6)


@settings(max_examples=40)
@given(st.lists(st.sampled_from([0, 1, 20, 256]), min_size=1, max_size=2000), st.sampled_from([1, 2, 77]))
def test_chunks_of_a_prompt_are_bounded_follow_each_other_and_cover_all(tops: list[int], start: int) -> None:
    token_ids = list(range(start + len(tops)))
    chunks = [chunk.prompt_logprobs for chunk in prompt_chunks(token_ids, start, [position(num) for num in tops])]
    held = 0 if start == 1 else start
    for chunk in chunks:
        assert chunk.start_position == held
        assert len(chunk.positions) == len(chunk.token_ids) - (held == 0)
        assert chunk.ByteSize() <= MOST_BYTES
        held = prompt_end(chunk)
    assert held == len(token_ids)
    assert [token for chunk in chunks for token in chunk.token_ids] == token_ids[0 if start == 1 else start :]
    assert [len(p.top) for chunk in chunks for p in chunk.positions] == tops


@pytest.mark.parametrize("start", [1, 5])
def test_a_prompt_that_fits_is_one_chunk(start: int) -> None:
    [chunk] = prompt_chunks(list(range(10)), start, [position(3)] * (10 - start))
    assert chunk.prompt_logprobs.start_position == (0 if start == 1 else start)
