"""Resuming an interrupted request: proof that it was ours, the same parameters, and agreement on the tokens.

A resume token is a MAC over request id, seed, model identity and tenant, so that any coordinator with the same secret
can check it without a store. It also carries the context length and the numerics id that the request was planned
with, because they decide its output: a resumed request keeps them.
"""

from __future__ import annotations

import hashlib
import hmac
from array import array
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from specdec.coordinator.tasks import LONG_TOKENS, pieces
from specdec.store.interface import JournalRecord
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import DataLoss, FailedPrecondition, InvalidRequest

_DIGEST_BYTES = 32
"""Bytes of a SHA-256 digest."""
_CONTEXT_BYTES = 4
_MAX_TOKEN_BYTES = 4096


@dataclass(frozen=True, slots=True)
class PlannedTerms:
    """The terms a request was planned with, read from its resume token. Untrusted until the token is checked."""

    max_model_len: int
    numerics_id: str


def planned_terms(token: bytes) -> PlannedTerms | None:
    """The terms in a token; None if the token is malformed."""
    if not _DIGEST_BYTES + _CONTEXT_BYTES <= len(token) <= _MAX_TOKEN_BYTES:
        return None
    numerics_at = _DIGEST_BYTES + _CONTEXT_BYTES
    try:
        numerics_id = token[numerics_at:].decode()
    except UnicodeDecodeError:
        return None
    return PlannedTerms(int.from_bytes(token[_DIGEST_BYTES:numerics_at], "big"), numerics_id)


def make_resume_token(secret: bytes, tenant: str, request_id: str, seed: int, identity: pb.ModelIdentity) -> bytes:
    """The token in the first chunk: a MAC, then the context length and numerics id, which the MAC covers too."""
    terms = identity.max_model_len.to_bytes(_CONTEXT_BYTES, "big") + identity.numerics_id.encode()
    parts = (
        tenant,
        request_id,
        str(seed),
        identity.name,
        identity.revision,
        identity.weights_digest,
        identity.tokenizer_digest,
    )
    pieces = (*(part.encode() for part in parts), terms)
    message = b"".join(len(data).to_bytes(4, "big") + data for data in pieces)
    return hmac.new(secret, message, hashlib.sha256).digest() + terms


def check_resume_token(given: bytes, expected: bytes) -> None:
    """Compare in constant time.

    Raises:
        InvalidRequest: the token belongs to another request, seed, model, tenant or deployment.
    """
    if not hmac.compare_digest(given, expected):
        raise InvalidRequest(
            "resume.resume_token",
            "does not belong to this request id, seed, model and tenant",
            reason="RESUME_TOKEN_INVALID",
        )


def check_template(resume: api.Resume, own: str) -> None:
    """Check that the conversation is rendered as it was for the original stream.

    Raises:
        FailedPrecondition: the coordinator's chat template differs from that of the original stream's coordinator.
    """
    if resume.chat_template_digest and resume.chat_template_digest != own:
        raise FailedPrecondition(
            "resume.chat_template_digest: the stream began with the chat template "
            f"{resume.chat_template_digest[:100]!r}, this coordinator has {own!r}: give all coordinators the same",
            reason="CHAT_TEMPLATE_CHANGED",
        )


def agree(choice: int, client_ids: Sequence[int], journal_ids: Sequence[int]) -> list[int]:
    """Merge the client's and the journal's tokens of a choice: they must be equal where they overlap; the longer wins.

    Raises:
        DataLoss: they differ; names the first position.
    """
    num = min(len(client_ids), len(journal_ids))
    if list(client_ids[:num]) != list(journal_ids[:num]):
        pairs = enumerate(zip(journal_ids, client_ids, strict=False))
        index, ours, theirs = next((index, ours, theirs) for index, (ours, theirs) in pairs if ours != theirs)
        raise DataLoss(
            f"choice {choice}: output token {index} is {theirs} for the client and {ours} in the journal",
            reason="TOKENS_DIFFER",
        )
    return list(journal_ids if len(journal_ids) > len(client_ids) else client_ids)


@dataclass(frozen=True, slots=True)
class HeldChoice:
    """Output tokens of a choice that need not be computed."""

    token_ids: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    num_at_client: int = 0
    """Tokens that the client has."""
    text_offset_bytes: int = 0
    """Bytes of their text that the client has."""


def prompt_logprobs_start(body: api.GenerateRequest, num_prompt_tokens: int) -> int:
    """First position whose prompt log-probabilities the client lacks, if it wants them.

    They come before the first choice's tokens, so a client that names no position but holds such tokens has them all.

    Raises:
        InvalidRequest: the position is past the prompt.
    """
    resume = body.resume
    if resume.HasField("prompt_logprobs_position"):
        if resume.prompt_logprobs_position > num_prompt_tokens:
            raise InvalidRequest(
                "resume.prompt_logprobs_position", f"is past the prompt, which has {num_prompt_tokens} tokens"
            )
        return resume.prompt_logprobs_position
    has_all = any(choice.index == 0 and choice.token_ids for choice in resume.choices)
    return num_prompt_tokens if has_all else 0


def held_choices(
    resume: api.Resume,
    n: int,
    record: JournalRecord | None,
    vocab_size: int,
    *,
    max_tokens: int,
    computed_again: Collection[int] = (),
) -> Generator[None, None, list[HeldChoice]]:
    """Merge what client and journal hold, choice by choice; for `in_turns`.

    For choices in `computed_again` only the client's tokens count: the journal keeps no log-probabilities.

    Raises:
        InvalidRequest: an index or a token id is out of range, an index comes twice, or a choice has more than
            `max_tokens` tokens.
        DataLoss: client and journal contradict each other.
    """
    held = list[HeldChoice]()
    for index in range(n):
        held.append(_agreed(index, (), 0, record, index in computed_again))
        if len(held[-1].token_ids) > LONG_TOKENS:
            yield
    seen: set[int] = set()
    for number, choice in enumerate(resume.choices):
        path = f"resume.choices[{number}]"
        if choice.index >= n or choice.index in seen:
            raise InvalidRequest(f"{path}.index", f"{choice.index} comes twice or is not below sampling.n ({n})")
        seen.add(choice.index)
        # Lengths first: a look at millions of ids would hold up other streams.
        if len(choice.token_ids) > max_tokens:
            message = f"{len(choice.token_ids)} ids are more than the {max_tokens} tokens that a choice may have"
            raise InvalidRequest(f"{path}.token_ids", message)
        token_ids = list[int]()
        for piece in pieces(choice.token_ids):
            if max(piece, default=0) >= vocab_size:
                raise InvalidRequest(f"{path}.token_ids", f"a token id is outside the vocabulary of {vocab_size}")
            if token_ids:
                yield
            token_ids += piece
        index = choice.index
        held[index] = _agreed(index, token_ids, choice.text_offset_bytes, record, index in computed_again)
    return held


def encode_params(body: api.GenerateRequest, prompt: Sequence[int], seed: int) -> bytes:
    """The parameters that decide a request's tokens: a digest of the prompt's token ids, then the fields.

    The prompt itself is not journalled: a resuming client sends it again.
    """
    kept = api.GenerateRequest(sampling=body.sampling)
    kept.sampling.seed = seed
    if kept.sampling.HasField("constraint"):  # as a digest: a schema may have 256 KiB
        encoded = kept.sampling.constraint.SerializeToString(deterministic=True)
        kept.sampling.constraint.CopyFrom(pb.Constraint(regex=hashlib.sha256(encoded).hexdigest()))
    kept.speculation.verify_mode = body.speculation.verify_mode
    kept.speculation.rejection_sample_method = body.speculation.rejection_sample_method
    return hashlib.sha256(array("Q", prompt).tobytes()).digest() + kept.SerializeToString(deterministic=True)


def check_params(journalled: bytes, given: bytes, prompt_field: str) -> None:
    """Compare a resumed request with the one that was journalled under its id.

    Args:
        journalled: `encode_params` of the request before.
        given: `encode_params` of the request now.
        prompt_field: name of the field with the prompt.

    Raises:
        InvalidRequest: they differ; names the first.
    """
    reason = "differs from the request that is resumed"
    if journalled[:_DIGEST_BYTES] != given[:_DIGEST_BYTES]:
        raise InvalidRequest(prompt_field, reason, reason="RESUME_DIFFERS")
    try:
        before = api.GenerateRequest.FromString(journalled[_DIGEST_BYTES:])
    except DecodeError:
        return  # written by another version in another form
    after = api.GenerateRequest.FromString(given[_DIGEST_BYTES:])
    old, new = ({field_.name: value for field_, value in body.sampling.ListFields()} for body in (before, after))
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            raise InvalidRequest(f"sampling.{name}", reason, reason="RESUME_DIFFERS")
    for name in ("verify_mode", "rejection_sample_method"):
        if getattr(before.speculation, name) != getattr(after.speculation, name):
            raise InvalidRequest(f"speculation.{name}", reason, reason="RESUME_DIFFERS")


def _agreed(
    index: int, client_ids: Sequence[int], text_offset: int, record: JournalRecord | None, is_computed_again: bool
) -> HeldChoice:
    known = record is not None and index < len(record.token_ids)
    journal_ids = record.token_ids[index] if record is not None and known else []
    journal_origins = record.origins[index] if record is not None and known else []
    token_ids = agree(index, client_ids, journal_ids)
    if is_computed_again:
        token_ids = list(client_ids)
    origins = list(journal_origins[: len(token_ids)])
    origins += [pb.ORIGIN_DECODE] * (len(token_ids) - len(origins))
    return HeldChoice(token_ids, origins, len(client_ids), text_offset)
