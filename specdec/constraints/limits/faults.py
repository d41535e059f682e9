"""Checks a constraint without compiling it, and the error for one that does not compile."""

from __future__ import annotations

import json

from google.rpc import code_pb2

from specdec.constraints.limits.structural_tags import StructuralTagFault, read_structural_tag
from specdec.v1 import common_pb2 as pb

MAX_CONSTRAINT_BYTES = 256 * 1024
"""Bytes of a constraint: a hundred schemas of tools. What takes too long to compile is refused then."""
MAX_CHOICES = 1024
_FORMS = tuple(field.name for field in pb.Constraint.DESCRIPTOR.oneofs_by_name["form"].fields)


class GrammarError(Exception):
    """A constraint that cannot be compiled or followed. `field` is its path; the message is for clients."""

    def __init__(
        self, field: str, message: str, code: int = code_pb2.INVALID_ARGUMENT, *, reason: str | None = None
    ) -> None:
        """`reason`: stable and machine-readable; None: by `code`."""
        super().__init__(message)
        self.field = field
        self.code = code
        self.reason = reason or ("INVALID_FIELD" if code == code_pb2.INVALID_ARGUMENT else "CONSTRAINT_NOT_COMPILED")


MOST_WAIT_S = 30.0
"""Seconds that a session waits for a compilation, or for one mask, before it ends as too many."""


def too_many(field: str) -> GrammarError:
    """The error of a session that has waited for `MOST_WAIT_S`."""
    message = "too many costly constraints are in use: retry later"
    return GrammarError(field, message, code_pb2.RESOURCE_EXHAUSTED, reason="CONSTRAINT_OVERLOAD")


def fault_of(constraint: pb.Constraint) -> tuple[str, str] | None:
    """The faulty field, such as ``constraint.regex``, and its error; None if no fault is visible.

    Cost: linear in the text; at most a millisecond.
    """
    form = constraint.WhichOneof("form")
    if form is None:
        return "constraint", f"one of {', '.join(_FORMS)} must be set"
    field = f"constraint.{form}"
    if constraint.ByteSize() > MAX_CONSTRAINT_BYTES:
        return field, f"{constraint.ByteSize()} bytes are more than the limit of {MAX_CONSTRAINT_BYTES}"
    if form == "json_object":
        return None if constraint.json_object else (field, "must be true")
    if form == "choice":
        return _fault_of_choice(field, constraint.choice.texts)
    text: str = getattr(constraint, form)
    if form == "json_schema":
        return _fault_of_schema(field, text)
    if form == "structural_tag":
        return _fault_of_tags(field, text)
    return None if text else (field, "must not be empty")


def _fault_of_choice(field: str, texts: object) -> tuple[str, str] | None:
    choices = list(texts)  # type: ignore[call-overload]
    if not 1 <= len(choices) <= MAX_CHOICES:
        return f"{field}.texts", f"{len(choices)} texts, not 1 to {MAX_CHOICES}"
    empty = next((index for index, text in enumerate(choices) if not text), None)
    return None if empty is None else (f"{field}.texts[{empty}]", "must not be empty")


def _fault_of_schema(field: str, text: str) -> tuple[str, str] | None:
    try:
        schema = json.loads(text)
    except RecursionError:
        return field, "is nested too deeply"
    except ValueError as error:
        return field, f"is not JSON: {error}"
    if not isinstance(schema, dict | bool):
        return field, "must be a JSON object or a boolean"
    return None


def _fault_of_tags(field: str, text: str) -> tuple[str, str] | None:
    try:
        read_structural_tag(text)
    except StructuralTagFault as fault:
        return f"{field}{fault.path}", str(fault)
    return None
