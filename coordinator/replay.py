"""Replaying the tokens of an interrupted request before a session opens for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.decode_loop import DecodeLoop, add_tokens
from coordinator.output import EndRules
from coordinator.resume import agree
from coordinator.sessions import Session
from specdec.rpc.errors import InvalidRequest
from specdec.store.interface import JournalRecord
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api


@dataclass(frozen=True, slots=True)
class HeldChoice:
    """Output tokens of a choice that need no computing."""

    token_ids: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    num_at_client: int = 0
    """How many of them the client has."""
    text_offset_bytes: int = 0
    """How much of their text the client has."""


def held_choices(
    resume: api.Resume, n: int, record: JournalRecord | None, vocab_size: int, with_logprobs: bool
) -> list[HeldChoice]:
    """What client and journal hold, choice by choice.

    With log-probabilities, what only the journal holds is computed again: it does not keep them.

    Raises:
        InvalidRequest: an index or a token id is out of range, or an index comes twice.
        DataLoss: client and journal contradict each other.
    """
    held = [_agreed(index, (), 0, record, with_logprobs) for index in range(n)]
    seen: set[int] = set()
    for number, choice in enumerate(resume.choices):
        path = f"resume.choices[{number}]"
        if choice.index >= n or choice.index in seen:
            raise InvalidRequest(f"{path}.index", f"{choice.index} comes twice or is not below n ({n})")
        seen.add(choice.index)
        if any(token >= vocab_size for token in choice.token_ids):
            raise InvalidRequest(f"{path}.token_ids", f"a token id is outside the vocabulary of {vocab_size}")
        held[choice.index] = _agreed(choice.index, choice.token_ids, choice.text_offset_bytes, record, with_logprobs)
    return held


def replay(decode_loop: DecodeLoop, session: Session, held: HeldChoice, max_model_len: int) -> bool:
    """Run held tokens through detokeniser and stop check, and stream what the client lacks.

    Returns:
        Whether the choice has ended by that.

    Raises:
        InvalidRequest: tokens follow the choice's end, or the client claims more text than its tokens make.
    """
    if not held.token_ids:
        return False
    path = f"resume.choices[{session.choice}]"
    max_tokens = min(session.sampling.max_tokens, max_model_len - session.num_prompt_tokens)
    ends = set(session.sampling.stop_token_ids)
    if not session.sampling.ignore_eos:
        ends.update(session.request.model.eos_token_ids)
    rules = EndRules(frozenset(ends), session.sampling.min_tokens, max_tokens)
    step = session.output.replay(held.token_ids, rules)
    if step.num_kept < held.num_at_client:
        raise InvalidRequest(f"{path}.token_ids", f"the choice ends after token {step.num_kept}")
    text = step.text.encode()
    if held.text_offset_bytes > len(text):
        raise InvalidRequest(f"{path}.text_offset_bytes", f"the tokens make only {len(text)} bytes of text")
    session.token_ids.extend(held.token_ids[: step.num_kept])
    session.num_written += held.num_at_client
    new = slice(held.num_at_client, step.num_kept)
    token_ids = held.token_ids[new]
    rest = text[held.text_offset_bytes :].decode("utf-8", "ignore")
    if rest or token_ids:
        delta = session.request.stream.delta(session.choice)
        delta.text += rest
        add_tokens(delta, session.detokenizers, token_ids, _origins(held.origins[new]))
    if step.finish is not None:
        decode_loop.end(session, step.finish)
    return step.finish is not None


def _agreed(
    index: int, client_ids: Sequence[int], text_offset: int, record: JournalRecord | None, with_logprobs: bool
) -> HeldChoice:
    known = record is not None and index < len(record.token_ids)
    journal_ids = record.token_ids[index] if record is not None and known else []
    journal_origins = record.origins[index] if record is not None and known else []
    token_ids = agree(index, client_ids, journal_ids)
    if with_logprobs:
        token_ids = list(client_ids)
    origins = list(journal_origins[: len(token_ids)])
    origins += [pb.ORIGIN_DECODE] * (len(token_ids) - len(origins))
    return HeldChoice(token_ids, origins, len(client_ids), text_offset)


def _origins(values: Sequence[int]) -> list[pb.Origin.ValueType]:
    return [pb.Origin.ValueType(value) for value in values]
