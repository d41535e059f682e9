"""Turn pydantic's errors into OpenAI's form, which names the field as the client wrote it."""

from __future__ import annotations

import reprlib
from typing import Any, TypeVar

import pydantic

from specdec.gateway.api.errors import MOST_SHOWN_CHARS, ApiError, cut, invalid, unsupported
from specdec.gateway.api.fields import RequestModel
from specdec.gateway.api.foreign_fields import adapted

M = TypeVar("M", bound=RequestModel)
_MOST_INNER = 16
"""Unknown fields inside of others that are ignored, at most: each costs one more validation of the body."""
_OF_KINDS = ("union_tag_invalid", "union_tag_not_found")
"""Errors of an object whose type is unknown or absent."""
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = MOST_SHOWN_CHARS


def validated(model: type[M], body: Any, ignored: list[str] | None = None) -> M:
    """The request in a JSON value. Raises ApiError for the first faulty field.

    Args:
        model: the request's type.
        body: the JSON value; unknown fields that are ignored are taken out of it.
        ignored: gets the paths of unknown fields; None: they are refused.
    """
    if not isinstance(body, dict):
        raise invalid(None, "the body must be a JSON object", "invalid_type")
    body = adapted(model, body)
    if ignored is not None:
        known = {field.alias or name for name, field in model.model_fields.items()}
        unknown = [name for name in body if name not in known]
        ignored += unknown
        body = {name: value for name, value in body.items() if name in known} if unknown else body
    num_left = 0 if ignored is None else _MOST_INNER
    while True:
        try:
            return model.model_validate(body)
        except pydantic.ValidationError as error:
            problem = _first(body, error.errors(include_url=False))
        path = _path(body, problem)
        if ignored is None or problem["type"] != "extra_forbidden" or not num_left:
            raise _error_of(model, problem, path)
        ignored.append(_written(path))
        _remove(body, path)
        num_left -= 1


def _first(body: dict[str, Any], problems: list[Any]) -> Any:
    # A union gives a problem per type: that of the type which the value comes nearest to says most.
    def weight(one: Any) -> tuple[bool, int, list[int], bool]:
        path = _path(body, one)
        indexes = [step for step in path if isinstance(step, int)]
        return one["loc"][0] == problems[0]["loc"][0], len(path), indexes, not one["type"].endswith("_type")

    return max(problems, key=weight)


def _remove(body: dict[str, Any], path: list[str | int]) -> None:
    at: Any = body
    for step in path[:-1]:
        at = at[step]
    del at[path[-1]]


def _error_of(model: type[RequestModel], problem: Any, path: list[str | int]) -> ApiError:
    head, name = str(problem["loc"][0]), _written(path)
    if problem["type"] == "extra_forbidden":
        return invalid_argument(name)
    if problem["type"] in _OF_KINDS:
        name = f"{name}.type"
    if problem["type"] in ("missing", "union_tag_not_found"):
        return ApiError(400, f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")
    if head in model.unsupported:
        return unsupported(name, "this value is not supported by this server")
    is_type = problem["type"].endswith("_type")
    told, what = problem["input"], cut(problem["msg"])
    if problem["type"] in _OF_KINDS:
        told, what = told["type"], f"Input should be one of {problem['ctx']['expected_tags']}"
    message = f"Invalid {'type' if is_type else 'value'} for '{name}': {what}, got {short(told)}."
    return ApiError(400, message, param=name, code="invalid_type" if is_type else "invalid_value")


def invalid_argument(name: str) -> ApiError:
    """The error for an unknown field."""
    message = f"Unrecognized request argument supplied: {name}"
    return ApiError(400, message, param=name, code="unknown_parameter")


def short(value: Any) -> str:
    """The beginning of a value for people, at a bounded cost."""
    return cut(_SHOWN.repr(value))


def _path(body: dict[str, Any], problem: Any) -> list[str | int]:
    """The way to the value, without pydantic's names for the types that it tried."""
    at: Any = body
    path: list[str | int] = []
    location = problem["loc"]
    for number, step in enumerate(location):
        is_last = number == len(location) - 1
        if isinstance(step, str) and isinstance(at, dict):
            if problem["type"] == "extra_forbidden" and not is_last and _is_kind(at, step, location[number + 1 :]):
                continue
            if step in at or (is_last and problem["type"] == "missing"):
                path.append(step)
                at = at.get(step)
        elif isinstance(step, int) and isinstance(at, list) and step < len(at):
            path.append(step)
            at = at[step]
    return path


def _is_kind(at: dict[str, Any], step: str, rest: tuple[str | int, ...]) -> bool:
    """Whether a step names a kind of object, such as json_schema, and no field: the unknown field is beside it."""
    return at.get("type") == step and not (rest[0] == step and step in at) and rest[0] in at


def _written(path: list[str | int]) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{cut(step)}" for step in path)
    return cut(text.removeprefix("."))
