"""Log-probabilities in the three forms of OpenAI and vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from specdec.gateway.translation.text_place import TextPlace
from specdec.gateway.upstream.vocabulary import TokenTexts
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api

LEAST = -9999.0
"""Replaces minus infinity, which JSON lacks."""


def ids_in(chunk: api.GenerateResponse) -> Iterator[int]:
    """Ids of the tokens in a chunk's log-probabilities and steps."""
    match chunk.WhichOneof("chunk"):
        case "delta":
            for step in chunk.delta.steps:
                yield from step.tree.token_ids
            for token in chunk.delta.tokens:
                if token.HasField("logprobs"):
                    yield token.id
                    yield from (top.token_id for top in token.logprobs.top)
        case "prompt_logprobs":
            yield from chunk.prompt_logprobs.token_ids
            for position in chunk.prompt_logprobs.positions:
                yield from (top.token_id for top in position.top)


def chat_logprobs(tokens: Iterable[api.OutputToken], texts: TokenTexts) -> dict[str, Any]:
    """The tokens' log-probabilities, a `ChatLogprobs`."""
    return {"content": [_chat_token(token, texts) for token in tokens], "refusal": None}


def _chat_token(token: api.OutputToken, texts: TokenTexts) -> dict[str, Any]:
    return {
        **_chat_entry(token.id, token.logprobs.logprob, texts),
        "top_logprobs": [_chat_entry(top.token_id, top.logprob, texts) for top in token.logprobs.top],
    }


def _chat_entry(token_id: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    return {"token": texts.name(token_id), "logprob": max(logprob, LEAST), "bytes": list(texts.utf8(token_id))}


class CompletionLogprobsWriter:
    """Makes the lists of one choice of a completion."""

    def __init__(self, texts: TokenTexts, *, hides_special: bool = True) -> None:
        """`hides_special`: the output's text leaves special tokens out."""
        self._texts = texts
        self._place = TextPlace(texts, hides_special=hides_special)

    def of_prompt(self, prompt: api.PromptLogprobs, told: str) -> dict[str, Any]:
        """`CompletionLogprobsWriter` of a prompt, whose first token has none; `told`: its echoed text."""
        offsets = [self._place.advance_in(token_id, told) for token_id in prompt.token_ids]
        self._place.begin(len(told))
        num_without = len(prompt.token_ids) - len(prompt.positions)
        positions: list[pb.PositionLogprobs | None] = [None] * num_without
        return self._lists(list(prompt.token_ids), [*positions, *prompt.positions], offsets)

    def of_output(self, tokens: Sequence[api.OutputToken]) -> dict[str, Any]:
        """`CompletionLogprobsWriter` of the next output tokens."""
        offsets = [self._place.advance(token.id) for token in tokens]
        return self._lists([token.id for token in tokens], [token.logprobs for token in tokens], offsets)

    def skip(self, num_characters: int) -> None:
        """Begin the output behind a text of so many characters."""
        self._place.begin(num_characters)

    def _lists(
        self, ids: list[int], positions: Sequence[pb.PositionLogprobs | None], offsets: list[int]
    ) -> dict[str, Any]:
        return {
            "tokens": [self._texts.name(token_id) for token_id in ids],
            "token_logprobs": [None if at is None else max(at.logprob, LEAST) for at in positions],
            "top_logprobs": [
                None if at is None else self._top(token_id, at) for token_id, at in zip(ids, positions, strict=True)
            ],
            "text_offset": offsets,
        }

    def _top(self, token_id: int, at: pb.PositionLogprobs) -> dict[str, float]:
        """The most likely tokens and the actual one; of tokens with one text, the most likely."""
        top: dict[str, float] = {}
        for one in at.top:
            top.setdefault(self._texts.name(one.token_id), max(one.logprob, LEAST))
        top.setdefault(self._texts.name(token_id), max(at.logprob, LEAST))
        return top


def prompt_logprobs(prompt: api.PromptLogprobs, texts: TokenTexts) -> list[dict[str, Any] | None]:
    """vLLM's form: for each prompt token the alternatives and itself, by id. Only alternatives have a rank."""
    num_without = len(prompt.token_ids) - len(prompt.positions)
    told: list[dict[str, Any] | None] = [None] * num_without
    for token_id, at in zip(prompt.token_ids[num_without:], prompt.positions, strict=True):
        entries = {
            str(one.token_id): _ranked(one.token_id, one.logprob, rank, texts) for rank, one in enumerate(at.top, 1)
        }
        entries.setdefault(str(token_id), _ranked(token_id, at.logprob, None, texts))
        told.append(entries)
    return told


def _ranked(token_id: int, logprob: float, rank: int | None, texts: TokenTexts) -> dict[str, Any]:
    return {"logprob": max(logprob, LEAST), "rank": rank, "decoded_token": texts.text(token_id)}


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Several pieces of `CompletionLogprobsWriter` as one; None without pieces."""
    if not parts:
        return None
    return {name: [entry for part in parts for entry in part[name]] for name in parts[0]}
