"""Translate response_format and structured_outputs to the gRPC request's constraint."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import orjson

from specdec.constraints.limits import MAX_CONSTRAINT_BYTES
from specdec.gateway.api.errors import cut, invalid
from specdec.gateway.api.fields import (
    JsonObjectFormat,
    JsonSchemaFormat,
    SamplingFields,
    StructuralTagFormat,
    StructuredOutputs,
)
from specdec.gateway.schemas.enforceable import enforceable, unreadable
from specdec.v1 import common_pb2 as pb
from specdec.wire.errors import InvalidRequest

_FORMS = ("json_schema", "regex", "choice", "grammar", "json_object", "structural_tag")
_OF_ALL_FORMS = ("constraint", "constraint.after_token")
_WRITTEN = {"json_schema": "json"}
_FORMAT_FIELD = "response_format"
SCHEMA_FIELD = f"{_FORMAT_FIELD}.json_schema.schema"
_OUTPUTS_FIELD = "structured_outputs"


def constraint_of(request: SamplingFields, after_token: str, unenforced: list[str]) -> pb.Constraint | None:
    """The constraint, or None.

    Args:
        request: must not have both fields.
        after_token: text after which it begins, such as the end of a think section.
        unenforced: gets the paths of a schema's keywords that are not enforced.

    Raises:
        ApiError: the fields contradict each other or themselves.
        InvalidRequest: a schema is no JSON, or a strict one has a keyword that cannot be enforced.
    """
    of_format = _of_format(request, unenforced)
    of_outputs = _of_outputs(request.structured_outputs, unenforced)
    if of_format is not None and of_outputs is not None:
        raise invalid(_OUTPUTS_FIELD, f"conflicts with {_FORMAT_FIELD}: send one of them")
    constraint = of_outputs if of_format is None else of_format
    if constraint is not None:
        constraint.after_token = after_token
    return constraint


def constraint_names(request: SamplingFields) -> Mapping[str, str]:
    """HTTP field names by gRPC field names, for the field that brought the constraint."""
    if request.structured_outputs is None:
        # A structural tag is in the format itself, beside its type, or it is a schema beside tools.
        of_tag = SCHEMA_FIELD if isinstance(request.response_format, JsonSchemaFormat) else _FORMAT_FIELD
        names = dict.fromkeys(_OF_ALL_FORMS, _FORMAT_FIELD)
        return {**names, "constraint.json_schema": SCHEMA_FIELD, "constraint.structural_tag": of_tag}
    names = dict.fromkeys(_OF_ALL_FORMS, _OUTPUTS_FIELD)
    names |= {f"constraint.{form}": f"{_OUTPUTS_FIELD}.{_WRITTEN.get(form, form)}" for form in _FORMS}
    # A structural tag may hold another form in a family's channel.
    given = next((form for form in _FORMS if getattr(request.structured_outputs, form) is not None), "structural_tag")
    return {
        **names,
        "constraint.choice.texts": f"{_OUTPUTS_FIELD}.choice",
        "constraint.structural_tag": names[f"constraint.{given}"],
    }


def _of_format(request: SamplingFields, unenforced: list[str]) -> pb.Constraint | None:
    wanted = request.response_format
    if isinstance(wanted, JsonObjectFormat):
        return pb.Constraint(json_object=True)
    if isinstance(wanted, JsonSchemaFormat):
        told = wanted.json_schema
        if told.schema_ is None:
            return pb.Constraint(json_object=True)
        strict = told.strict is True
        schema = enforceable(told.schema_, SCHEMA_FIELD, strict=strict, unenforced=unenforced)
        return pb.Constraint(json_schema=_written(schema, SCHEMA_FIELD))
    if isinstance(wanted, StructuralTagFormat):
        tag = {name: value for name, value in wanted if value is not None}
        return pb.Constraint(structural_tag=_written(_with_schemas(tag, _FORMAT_FIELD, unenforced), _FORMAT_FIELD))
    return None


def _of_outputs(wanted: StructuredOutputs | None, unenforced: list[str]) -> pb.Constraint | None:
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
    path = f"{_OUTPUTS_FIELD}.{_WRITTEN.get(form, form)}"
    if form == "json_schema":
        value = enforceable(_parsed(value, path), path, strict=False, unenforced=unenforced)
    elif form == "structural_tag":
        try:
            value = _with_schemas(_parsed(value, path), path, unenforced)
        except RecursionError as error:
            raise InvalidRequest(path, unreadable(error)) from None
    if form in ("json_schema", "structural_tag") and not isinstance(value, str):
        value = _written(value, path)
    return pb.Constraint(**{form: value})


def _is_false_schema(wanted: StructuredOutputs, form: str) -> bool:
    return form == "json_schema" and wanted.json_schema is False


def _with_schemas(tag: Any, path: str, unenforced: list[str]) -> Any:
    """A structural tag whose schemas can be enforced."""
    if isinstance(tag, list):
        return [_with_schemas(each, f"{path}[{index}]", unenforced) for index, each in enumerate(tag)]
    if not isinstance(tag, Mapping):
        return tag
    # The older form has a schema beside a begin, the newer one an object of the type json_schema.
    name = "json_schema" if tag.get("type") == "json_schema" else "schema" if "begin" in tag else ""
    changed = {}
    for key, value in tag.items():
        if key == name:
            changed[key] = enforceable(value, f"{path}.{cut(key)}", strict=False, unenforced=unenforced)
        else:
            changed[key] = _with_schemas(value, f"{path}.{cut(key)}", unenforced)
    return changed


def _parsed(schema: Any, path: str) -> Any:
    """A schema that may be written as a text; what is too long is left to others. Raises InvalidRequest."""
    if not isinstance(schema, str) or len(schema) > MAX_CONSTRAINT_BYTES:
        return schema
    try:
        written = json.loads(schema, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(path, f"is not JSON: {error}") from None
    return schema if isinstance(written, str) else written


def _finite(written: str) -> float:
    value = float(written)
    if not math.isfinite(value):
        raise ValueError(f"{written} is no number")
    return value


def _written(schema: object, path: str) -> str:
    try:
        return orjson.dumps(schema).decode()
    except orjson.JSONEncodeError as error:
        raise InvalidRequest(path, unreadable(error)) from None
