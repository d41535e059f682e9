"""What targets must have in common to take over each other's sessions, and the model that clients see."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdec.config.generation_config import fault_of
from specdec.coordinator.sessions.session import Request
from specdec.coordinator.text.tokenizer import TextTokenizer
from specdec.v1 import common_pb2 as pb
from specdec.wire.errors import FailedPrecondition, InvalidRequest

_MOST_TEXT_BYTES = 1024
"""Bytes of each text in an identity, at most: it is shown, logged, and part of resume tokens."""
_MOST_END_IDS = 1024
"""End-of-sequence ids of a model, at most."""
_TEXTS = (
    "name", "revision", "architecture", "weights_digest", "config_digest", "tokenizer_digest", "numerics_id", "dtype",
    "device",
)  # fmt: skip


def unsound(identity: pb.ModelIdentity) -> str | None:
    """Why an identity cannot be that of a working replica, or None."""
    for name in _TEXTS:
        if (num_bytes := len(getattr(identity, name).encode())) > _MOST_TEXT_BYTES:
            return f"its {name} has {num_bytes} bytes; the limit is {_MOST_TEXT_BYTES}"
    if not identity.name:
        return "its model has no name"
    if not identity.vocab_size or identity.max_model_len < 2:
        return f"a vocabulary of {identity.vocab_size} and a context of {identity.max_model_len} tokens are too small"
    for field, value in identity.sampling_defaults.ListFields():
        if (fault := fault_of(field.name, value)) is not None:
            return f"its default {field.name} {fault}"
    if len(identity.eos_token_ids) > _MOST_END_IDS:
        return f"it has {len(identity.eos_token_ids)} end-of-sequence ids; the limit is {_MOST_END_IDS}"
    return None


def model_difference(a: pb.ModelIdentity, b: pb.ModelIdentity) -> str | None:
    """Why a session may never move between two identities: the first difference of those below, or None.

    Name, weights, config.json, tokenizer, vocabulary size, end-of-sequence ids. Contexts may differ: see `may_serve`.
    """
    if (a.name, a.weights_digest) != (b.name, b.weights_digest):
        return f"{a.name} ({a.weights_digest}) and {b.name} ({b.weights_digest}) are different models"
    if a.config_digest and b.config_digest and a.config_digest != b.config_digest:  # former releases tell none
        return f"{a.name} has another config.json at each ({a.config_digest}, {b.config_digest})"
    if a.tokenizer_digest != b.tokenizer_digest:
        return f"their tokenizers differ ({a.tokenizer_digest or 'unknown'}, {b.tokenizer_digest or 'unknown'})"
    if a.vocab_size != b.vocab_size:
        return f"their vocabularies differ ({a.vocab_size}, {b.vocab_size})"
    ours, theirs = sorted(a.eos_token_ids), sorted(b.eos_token_ids)
    if ours != theirs:
        return f"their end-of-sequence ids differ ({_listed(ours)}; {_listed(theirs)})"
    return None


def difference(a: pb.ModelIdentity, b: pb.ModelIdentity, *, allow_mixed_numerics: bool) -> str | None:
    """`model_difference`, and the numerics unless they may differ."""
    if (cause := model_difference(a, b)) is not None:
        return cause
    if a.numerics_id != b.numerics_id and not allow_mixed_numerics:
        return f"their numerics differ ({a.numerics_id or 'unknown'}, {b.numerics_id or 'unknown'})"
    return None


def may_serve(identity: pb.ModelIdentity, request: Request, *, allow_mixed_numerics: bool) -> bool:
    """Whether a target can decode a request to its end, with the same output as any other."""
    if difference(request.model, identity, allow_mixed_numerics=allow_mixed_numerics) is not None:
        return False
    if request.is_constrained and identity.constraints_id != request.model.constraints_id:
        return False
    return identity.max_model_len >= request.num_context_tokens


def _listed(token_ids: list[int]) -> str:
    return ", ".join(map(str, token_ids)) or "none"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that clients see: the targets' common identity, and the tokenizer."""

    identity: pb.ModelIdentity
    """Its context is the shortest of all usable targets; new requests get its numerics and constraints."""
    tokenizer: TextTokenizer

    def with_terms(self, max_model_len: int, numerics_id: str, terms: pb.ModelIdentity | None = None) -> ServedModel:
        """This model with another context and numerics, and with the constraint engine, sampling defaults and config
        digest of `terms`."""
        identity = pb.ModelIdentity()
        identity.CopyFrom(self.identity)
        identity.max_model_len, identity.numerics_id = max_model_len, numerics_id
        if terms is not None:
            identity.constraints_id = terms.constraints_id
            if identity.sampling_defaults != terms.sampling_defaults:
                identity.sampling_defaults.CopyFrom(terms.sampling_defaults)
            identity.config_digest = terms.config_digest or identity.config_digest
        return self if identity == self.identity else replace(self, identity=identity)

    def as_begun(self, begun: pb.ModelIdentity) -> ServedModel:
        """This model with the terms of a stream that began with another coordinator or earlier.

        Raises:
            InvalidRequest: `begun` is no model's identity.
            FailedPrecondition: it is another model.
        """
        if (fault := unsound(begun)) is not None:
            raise InvalidRequest("resume.model", fault)
        if (cause := model_difference(begun, self.identity)) is not None:
            raise FailedPrecondition(
                f"resume.model: {cause}: the output could differ; start the request anew", reason="MODEL_CHANGED"
            )
        return self.with_terms(self.identity.max_model_len, self.identity.numerics_id, begun)
