"""What clients get: the targets' common model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from coordinator.text.tokenizer import TextTokenizer
from specdec.v1 import common_pb2 as pb


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What clients get: the targets' common model, and its tokenizer."""

    identity: pb.ModelIdentity
    """Its context is the shortest of the usable targets', its numerics those that new requests get."""
    tokenizer: TextTokenizer

    def with_terms(self, max_model_len: int, numerics_id: str) -> ServedModel:
        """The same model with another context and other numerics."""
        if (self.identity.max_model_len, self.identity.numerics_id) == (max_model_len, numerics_id):
            return self
        identity = pb.ModelIdentity()
        identity.CopyFrom(self.identity)
        identity.max_model_len, identity.numerics_id = max_model_len, numerics_id
        return replace(self, identity=identity)
