"""Where a constraint begins to hold: from a token on that clients name by its text, such as the end of thinking."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.coordinator.text.tokenizer import TextTokenizer
from specdec.v1 import common_pb2 as pb
from specdec.wire.errors import InvalidRequest

_MOST_BEHIND = 3
"""Tokens of layout that a template may put between the end of an empty think section and the answer."""


def resolve_start(constraint: pb.Constraint, prompt: Sequence[int], tokenizer: TextTokenizer) -> None:
    """Put the token's id in place of its text, or nothing where the prompt ends with it: the answer begins at once.

    Raises:
        InvalidRequest: the tokenizer has no such token.
    """
    if not (text := constraint.after_token):
        return
    token_id = tokenizer.token_id(text)
    if token_id is None:
        message = f"{text[:100]!r} is not a token of the model's"
        raise InvalidRequest("sampling.constraint.after_token", message)
    constraint.after_token = ""
    if token_id not in prompt[-1 - _MOST_BEHIND :]:
        constraint.after_token_id = token_id
