"""The error of a constraint, importable without llguidance."""

from __future__ import annotations

from google.rpc import code_pb2


class GrammarError(Exception):
    """A constraint that cannot be compiled or followed. `field` is its path; the message is for clients."""

    def __init__(self, field: str, message: str, code: int = code_pb2.INVALID_ARGUMENT) -> None:
        super().__init__(message)
        self.field = field
        self.code = code
