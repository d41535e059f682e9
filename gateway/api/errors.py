"""Errors in OpenAI's form."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from pydantic import BaseModel, Field

from specdec.wire import errors as rpc
from specdec.wire.abort import told_wait_s
from specdec.wire.errors import SpecdecError

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
_QUOTA_REASONS = ("QUOTA_EXCEEDED",)
MOST_SHOWN_CHARS = 100
"""Characters of a client's value that an error quotes."""
_MOST_MESSAGE_CHARS = 2000
"""Characters of an error message, at most."""
_LEAST_RETRY_S = (0.5, 1.5)
"""Seconds, at least, that a caller is told to wait: drawn, as callers that were refused together would return together.
"""


class ErrorBody(BaseModel):
    """An error."""

    message: str
    type: str = Field(description="invalid_request_error, requests, tokens, timeout or server_error.")
    param: str | None = Field(description="The faulty field, if there is one.")
    code: str | None = Field(description="Stable name of the cause.")


class ErrorAnswer(BaseModel):
    """The body of every answer with a status of 400 or more, and of the event that ends a stream in an error."""

    error: ErrorBody


class ApiError(Exception):
    """An answer with an HTTP status of 400 or more."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = cut(message, _MOST_MESSAGE_CHARS)
        self.type = type
        self.param = param and cut(param, _MOST_MESSAGE_CHARS)
        self.code = code
        self.retry_after_s = None if retry_after_s is None else max(retry_after_s, random.uniform(*_LEAST_RETRY_S))

    @property
    def body(self) -> dict[str, object]:
        """The body, an `ErrorAnswer`."""
        told = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": told}

    @property
    def headers(self) -> dict[str, str]:
        """When to try again, in whole seconds and in milliseconds; empty without a time.

        OpenAI's and Anthropic's clients prefer milliseconds. Those that only know whole seconds come back in crowds.
        """
        if self.retry_after_s is None:
            return {}
        return {
            "retry-after": str(math.ceil(self.retry_after_s)),
            "retry-after-ms": str(math.ceil(1000 * self.retry_after_s)),
        }


def cut(text: str, most_chars: int = MOST_SHOWN_CHARS) -> str:
    """The first characters of a text, with "..." if it is cut."""
    return text if len(text) <= most_chars else f"{text[:most_chars]}..."


def invalid(param: str | None, problem: str, code: str = "invalid_value") -> ApiError:
    """An error 400 that names the faulty field."""
    return ApiError(400, f"{param}: {problem}" if param else problem, param=param, code=code)


def unsupported(param: str, what: str = "is not supported by this server") -> ApiError:
    """An error 400 for a value that this server does not support."""
    return invalid(param, what, "unsupported_parameter")


_STATUSES: Mapping[type[SpecdecError], tuple[int, str, str]] = {
    rpc.Unauthenticated: (401, INVALID_REQUEST, "invalid_api_key"),
    rpc.PermissionDenied: (403, INVALID_REQUEST, "permission_denied"),
    rpc.NotFound: (404, INVALID_REQUEST, "not_found"),
    rpc.RequestExists: (409, INVALID_REQUEST, "request_exists"),
    rpc.FailedPrecondition: (409, INVALID_REQUEST, "failed_precondition"),
    rpc.Overloaded: (429, "requests", "rate_limit_exceeded"),
    rpc.Cancelled: (499, INVALID_REQUEST, "cancelled"),
    rpc.Unimplemented: (501, SERVER_ERROR, "not_implemented"),
    rpc.Unavailable: (503, SERVER_ERROR, "service_unavailable"),
    rpc.DeadlineExceeded: (504, "timeout", "deadline_exceeded"),
}
"""Status, type and code; other errors are 500."""


def from_specdec(error: SpecdecError, names: Mapping[str, str]) -> ApiError:
    """A coordinator's error as an HTTP error.

    Args:
        error: from a call.
        names: HTTP field names by gRPC field names, where they differ.
    """
    if isinstance(error, rpc.InvalidRequest):
        param = param_of(error.field, names)
        code = "context_length_exceeded" if error.reason == rpc.CONTEXT_LENGTH_EXCEEDED else "invalid_value"
        return ApiError(400, f"{param}: {error.description}", param=param, code=code)
    if isinstance(error, rpc.ModelNotFound):
        return ApiError(404, error.message, param="model", code="model_not_found")
    for cls, (status, type_, code) in _STATUSES.items():
        if isinstance(error, cls):
            if error.reason in _QUOTA_REASONS:
                type_ = "tokens"
            retry_after_s = getattr(error, "retry_after_s", None)
            if isinstance(error, rpc.Unavailable):  # coordinators spread the waits of those that they refuse
                retry_after_s = told_wait_s(error.retry_after_s)
            at_fault = "request_id" if isinstance(error, rpc.RequestExists) else None
            return ApiError(status, error.message, type=type_, param=at_fault, code=code, retry_after_s=retry_after_s)
    return ApiError(500, error.message, type=SERVER_ERROR, code="internal_error")


def param_of(field: str, names: Mapping[str, str]) -> str:
    """Path of a field in the HTTP request, from its gRPC path, such as sampling.stop[0]."""
    path = field.removeprefix("sampling.")
    if path.startswith("messages."):
        path = path.removeprefix("messages.")
    head = path
    while head:
        if head in names:
            return names[head] + path[len(head) :]
        cut = max(head.rfind("."), head.rfind("["))
        head = head[:cut] if cut > 0 else ""
    return path
