"""Translate response_format and structured_outputs to the gRPC request's constraint."""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from specdec.gateway.api.errors import invalid
from specdec.gateway.api.fields import (
    JsonObjectFormat,
    JsonSchemaFormat,
    SamplingFields,
    StructuralTagFormat,
    StructuredOutputs,
)
from specdec.v1 import common_pb2 as pb

_FORMS = ("json_schema", "regex", "choice", "grammar", "json_object", "structural_tag")
_WRITTEN = {"json_schema": "json"}
_FORMAT_FIELD = "response_format"
_OUTPUTS_FIELD = "structured_outputs"


def constraint_of(request: SamplingFields, after_token: str = "") -> pb.Constraint | None:
    """The constraint, or None.

    Args:
        request: must not have both fields.
        after_token: text after which it begins, such as the end of a think section.

    Raises:
        ApiError: the fields contradict each other or themselves.
    """
    of_format, of_outputs = _of_format(request), _of_outputs(request.structured_outputs)
    if of_format is not None and of_outputs is not None:
        raise invalid(_OUTPUTS_FIELD, f"conflicts with {_FORMAT_FIELD}: send one of them")
    constraint = of_outputs if of_format is None else of_format
    if constraint is not None:
        constraint.after_token = after_token
    return constraint


def constraint_names(request: SamplingFields) -> Mapping[str, str]:
    """HTTP field names by gRPC field names, for the field that brought the constraint."""
    if request.structured_outputs is None:
        # A structural tag is in the format itself, beside its type.
        of_schema = {"constraint.json_schema": f"{_FORMAT_FIELD}.json_schema.schema"}
        return {"constraint": _FORMAT_FIELD, "constraint.structural_tag": _FORMAT_FIELD, **of_schema}
    names = {f"constraint.{form}": f"{_OUTPUTS_FIELD}.{_WRITTEN.get(form, form)}" for form in _FORMS}
    return {"constraint": _OUTPUTS_FIELD, **names, "constraint.choice.texts": f"{_OUTPUTS_FIELD}.choice"}


def _of_format(request: SamplingFields) -> pb.Constraint | None:
    wanted = request.response_format
    if isinstance(wanted, JsonObjectFormat):
        return pb.Constraint(json_object=True)
    if isinstance(wanted, JsonSchemaFormat):
        schema = wanted.json_schema.schema_
        return pb.Constraint(json_object=True) if schema is None else pb.Constraint(json_schema=_written(schema))
    if isinstance(wanted, StructuralTagFormat):
        told = {name: value for name, value in wanted if value is not None}
        return pb.Constraint(structural_tag=_written(told))
    return None


def _of_outputs(wanted: StructuredOutputs | None) -> pb.Constraint | None:
    if wanted is None:
        return None
    given = [form for form in _FORMS if getattr(wanted, form) not in (None, False) or _is_false_schema(wanted, form)]
    if len(given) != 1:
        raise invalid(
            _OUTPUTS_FIELD, f"exactly one of {', '.join(_WRITTEN.get(form, form) for form in _FORMS)} must be set"
        )
    form, value = given[0], getattr(wanted, given[0])
    if form == "choice":
        return pb.Constraint(choice=pb.TextChoices(texts=value))
    if form in ("json_schema", "structural_tag") and not isinstance(value, str):
        value = _written(value)
    return pb.Constraint(**{form: value})


def _is_false_schema(wanted: StructuredOutputs, form: str) -> bool:
    return form == "json_schema" and wanted.json_schema is False


def _written(schema: object) -> str:
    return orjson.dumps(schema).decode()
