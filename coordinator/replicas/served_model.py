"""What clients get: the targets' common model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdec.coordinator.text.tokenizer import TextTokenizer
from specdec.v1 import common_pb2 as pb


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What clients get: the targets' common model, and its tokenizer."""

    identity: pb.ModelIdentity
    """Its context is the shortest of the usable targets', its numerics and its constraints are those that new requests
    get."""
    tokenizer: TextTokenizer

    def with_terms(self, max_model_len: int, numerics_id: str, constraints_id: str | None = None) -> ServedModel:
        """The same model with another context, other numerics, and, unless None, other constraints."""
        own = self.identity
        known = own.constraints_id if constraints_id is None else constraints_id
        if (own.max_model_len, own.numerics_id, own.constraints_id) == (max_model_len, numerics_id, known):
            return self
        identity = pb.ModelIdentity()
        identity.CopyFrom(self.identity)
        identity.max_model_len, identity.numerics_id, identity.constraints_id = max_model_len, numerics_id, known
        return replace(self, identity=identity)
