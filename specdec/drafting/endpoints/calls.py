"""Calls an OpenAI-compatible endpoint's completions and checks everything that comes back.

Follows no redirect, uses no proxy of the environment, decompresses nothing. Lines and whole answers are bounded.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from specdec.config.endpoint_options import EndpointOptions

_MOST_LINE_BYTES = 64 * 2**10
_MOST_ANSWER_BYTES = 4 * 2**20
_MOST_KEY_BYTES = 4096


class ApiRefused(ValueError):
    """The options describe no usable endpoint. The message names the option, never the key."""


class ApiFault(Exception):
    """An unusable answer. `kind` is one word for logs and metrics, without the answer's content."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint's address, model and key."""

    host: str
    port: int | None
    is_tls: bool
    path: str
    """Path of the completions' URL."""
    model: str
    key: str = field(repr=False)
    """API key; empty: none is sent."""
    timeout_s: float
    """Seconds of silence, or of connecting, after which a call fails."""

    def connect(self) -> http.client.HTTPConnection:
        """A connection that is not open yet."""
        if self.is_tls:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self.host, self.port, timeout=self.timeout_s, context=context)
        return http.client.HTTPConnection(self.host, self.port, timeout=self.timeout_s)


def read_endpoint(options: EndpointOptions) -> Endpoint:
    """The endpoint of the options, with its key read from their file or variable. Raises ApiRefused."""
    url = urlsplit(options.base_url)
    if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
        raise ApiRefused("base_url: must be http://host[:port]/v1 or https://host[:port]/v1")
    if url.username is not None or url.password is not None:
        raise ApiRefused("base_url: must hold no user or password; use api_key_file")
    try:
        port = url.port
    except ValueError as error:
        raise ApiRefused("base_url: the port must be a number below 65536") from error
    path = f"{url.path.rstrip('/')}/completions"
    return Endpoint(
        url.hostname, port, url.scheme == "https", path, options.model, _read_key(options), options.timeout_s
    )


def _read_key(options: EndpointOptions) -> str:
    if options.api_key_file is not None:
        try:
            with Path(options.api_key_file).open("rb") as file:
                key = file.read(_MOST_KEY_BYTES).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ApiRefused(f"api_key_file: cannot be read: {type(error).__name__}") from None
        source = "api_key_file"
    elif options.api_key_env is not None:
        key, source = os.environ.get(options.api_key_env, "").strip(), "api_key_env"
    else:
        return ""
    if not key or not all("!" <= character <= "~" for character in key):
        raise ApiRefused(f"{source}: holds no key of printable ASCII characters")
    return key


@dataclass(frozen=True, slots=True)
class Piece:
    """One event of a streamed answer."""

    text: str
    finish_reason: str | None = None
    num_completion_tokens: int | None = None
    """The endpoint's own count."""


def stream_completion(
    endpoint: Endpoint, connection: http.client.HTTPConnection, prompt: str, max_tokens: int
) -> Iterator[Piece]:
    """Greedy text after a prompt, piece by piece.

    Raises ApiFault for an invalid answer, OSError or http.client.HTTPException if the connection fails.
    """
    body = {
        "model": endpoint.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    yield from _pieces(_ask(endpoint, connection, body, "text/event-stream"))


def complete(endpoint: Endpoint, connection: http.client.HTTPConnection, body: Any, most_bytes: int) -> Any:
    """The answer to a body: a JSON object of at most `most_bytes`. Raises as `stream_completion` does."""
    response = _ask(endpoint, connection, body, "application/json")
    content = bytearray()
    while chunk := response.read1(65536):
        content += chunk
        if len(content) > most_bytes:
            raise ApiFault("too_much")
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        raise ApiFault("no_json") from None
    if not isinstance(answer, dict):
        raise ApiFault("wrong_json")
    return answer


def _ask(
    endpoint: Endpoint, connection: http.client.HTTPConnection, body: Any, content_type: str
) -> http.client.HTTPResponse:
    headers = {"Content-Type": "application/json", "Accept": content_type, "Accept-Encoding": "identity"}
    if endpoint.key:
        headers["Authorization"] = f"Bearer {endpoint.key}"
    connection.request("POST", endpoint.path, json.dumps(body).encode(), headers)
    response = connection.getresponse()
    if 300 <= response.status < 400:
        raise ApiFault("redirect")
    if response.status != 200:
        raise ApiFault(f"status_{response.status // 100}xx")
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ApiFault("encoding")
    if response.headers.get_content_type() != content_type:
        raise ApiFault("content_type")
    return response


def _pieces(response: http.client.HTTPResponse) -> Iterator[Piece]:
    num_bytes = 0
    while line := response.readline(_MOST_LINE_BYTES + 1):
        num_bytes += len(line)
        if len(line) > _MOST_LINE_BYTES:
            raise ApiFault("long_line")
        if num_bytes > _MOST_ANSWER_BYTES:
            raise ApiFault("too_much")
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        yield _piece(data)
    raise ApiFault("cut_off")


def _piece(data: bytes) -> Piece:
    try:
        event: Any = json.loads(data)
    except (ValueError, RecursionError):
        raise ApiFault("no_json") from None
    if not isinstance(event, dict) or "error" in event:
        raise ApiFault("error_event" if isinstance(event, dict) else "wrong_json")
    usage = event.get("usage")
    counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if not isinstance(counted, int) or isinstance(counted, bool):
        counted = None
    choices = event.get("choices")
    if choices == []:
        return Piece("", None, counted)
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise ApiFault("wrong_json")
    text, finish_reason = choices[0].get("text", ""), choices[0].get("finish_reason")
    if not isinstance(text, str) or not isinstance(finish_reason, str | None):
        raise ApiFault("wrong_json")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ApiFault("no_unicode") from None
    return Piece(text, finish_reason, counted)
