"""Turn pydantic's errors into OpenAI's form, which names the field as the client wrote it."""

from __future__ import annotations

import reprlib
from typing import Any, TypeVar

import pydantic

from specdec.gateway.api.errors import MOST_SHOWN_CHARS, ApiError, cut, invalid, unsupported
from specdec.gateway.api.fields import RequestModel

M = TypeVar("M", bound=RequestModel)
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = MOST_SHOWN_CHARS


def validated(model: type[M], body: Any) -> M:
    """The request in a JSON value. Raises ApiError for the first faulty field."""
    if not isinstance(body, dict):
        raise invalid(None, "the body must be a JSON object", "invalid_type")
    try:
        return model.model_validate(body)
    except pydantic.ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
    raise _first_error(model, body, problems)


def _first_error(model: type[RequestModel], body: dict[str, Any], problems: list[Any]) -> ApiError:
    # A union gives a problem per type: the deepest path says most.
    problem = max(problems, key=lambda one: (one["loc"][0] == problems[0]["loc"][0], len(_path(body, one))))
    path = _path(body, problem)
    head, name = str(problem["loc"][0]), _written(path)
    if problem["type"] == "extra_forbidden":
        return invalid_argument(name)
    if problem["type"] == "missing":
        return ApiError(400, f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")
    if head in model.unsupported:
        return unsupported(name, "this value is not supported by this server")
    is_type = problem["type"].endswith("_type")
    shown = short(problem["input"])
    message = f"Invalid {'type' if is_type else 'value'} for '{name}': {cut(problem['msg'])}, got {shown}."
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
            if step in at or (is_last and problem["type"] == "missing"):
                path.append(step)
                at = at.get(step)
        elif isinstance(step, int) and isinstance(at, list) and step < len(at):
            path.append(step)
            at = at[step]
    return path


def _written(path: list[str | int]) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{cut(step)}" for step in path)
    return cut(text.removeprefix("."))
