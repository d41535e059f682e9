"""A small typed client of the coordinator."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, TypeVar

import grpc
from google.protobuf import descriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from specdec.v1 import coordinator_pb2, coordinator_pb2_grpc
from specdec.wire.backoff import Backoff
from specdec.wire.errors import (
    CUT_OFF,
    FailedPrecondition,
    Internal,
    InvalidRequest,
    Unavailable,
    from_rpc_error,
)
from specdec.wire.parsing.reading import parsed, parsing

_T = TypeVar("_T")
# Waits between attempts to connect. gRPC's own grow to two minutes, in which a coordinator that is back is not noticed.
# These are shorter than a call's attempts together: a coordinator that is back is found before all attempts are used.
_FIRST_RECONNECT_MS = 100
_LONGEST_RECONNECT_MS = 1000

# gRPC itself retries calls that were refused or never reached a server, unless the server forbids it (see
# specdec.wire.abort). A stopping server ends calls it has not read as CANCELLED. A stream is retried only before its
# first chunk, so no token comes twice.
MOST_ATTEMPTS = 5
RETRY_WAITS = Backoff(first_s=0.1, longest_s=2.0, spread=(0.8, 1.2))
"""Waits between the attempts, as gRPC draws them: in seconds."""
RETRY_POLICY = {
    "maxAttempts": MOST_ATTEMPTS,
    "initialBackoff": f"{RETRY_WAITS.first_s:g}s",
    "maxBackoff": f"{RETRY_WAITS.longest_s:g}s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """How to reach the coordinator. Times in seconds."""

    timeout_s: float | None = None
    """Deadline of one call; the server learns it and stops working for a call that has passed it."""
    keepalive_s: float = 3.0
    """Pings a silent server after this time, while calls run. Coordinators accept one ping per second; a proxy may
    accept fewer, and then closes the connection."""
    keepalive_timeout_s: float = 3.0
    """Time for the answer to a ping; after it the server counts as gone, and its calls end UNAVAILABLE."""
    connect_timeout_s: float = 5.0
    """Time to connect to one address before the next is tried."""
    retries: bool = True
    """gRPC calls again, at the same address, where no answer had begun. If that server is frozen, this takes
    `connect_timeout_s` more: a caller that knows other coordinators asks those instead."""
    max_message_bytes: int = 16 * 1024 * 1024
    unread_bytes: int | None = None
    """Bytes of one stream that may wait unread in this process, about; None: as many as the connection's speed and
    delay suggest to gRPC, which may be megabytes. What waits holds up a connection's other streams."""
    authority: str | None = None
    """name:port that the server is called by, and that its certificate must have; None: the address."""
    tls: bool = False
    """Use TLS. The certificates below turn it on, too."""
    root_certificates: bytes | None = None
    """PEM authorities of the server's certificate; None: those that gRPC trusts (its own list, or the file in
    GRPC_DEFAULT_SSL_ROOTS_FILE_PATH)."""
    client_certificate: tuple[bytes, bytes] | None = None
    """PEM key and certificate chain, for mutual TLS."""
    metadata: tuple[tuple[str, str], ...] = ()
    api_key: str | None = field(default=None, repr=False)
    """Sent with every call, as `authorization: Bearer KEY`; without TLS it travels unencrypted."""

    def call_metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call, including the span in OpenTelemetry's current context."""
        own = () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)
        trace: dict[str, str] = {}
        if all(name != "traceparent" for name, _ in self.metadata):
            TraceContextTextMapPropagator().inject(trace)
        return (*self.metadata, *own, *trace.items())

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials of a TLS channel; None without TLS."""
        if not (self.tls or self.root_certificates or self.client_certificate):
            return None
        key, chain = self.client_certificate or (None, None)
        return grpc.ssl_channel_credentials(self.root_certificates, key, chain)

    def check_size(self, request: Message) -> None:
        """Raise InvalidRequest if a request is larger than `max_message_bytes`."""
        # gRPC itself would answer RESOURCE_EXHAUSTED, which suggests a retry.
        num_bytes, most = request.ByteSize(), self.max_message_bytes
        if num_bytes > most:
            raise InvalidRequest("request", f"{num_bytes} bytes exceed the limit of {most} (max_message_bytes)")

    def channel_options(self) -> list[tuple[str, str | int]]:
        """Options of the gRPC channel: retries, keepalive, message limits."""
        service = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]
        unread: list[tuple[str, str | int]] = []
        if self.unread_bytes is not None:
            unread = [("grpc.http2.lookahead_bytes", self.unread_bytes), ("grpc.http2.bdp_probe", 0)]
        authority: list[tuple[str, str | int]] = []
        if self.authority is not None:
            authority = [("grpc.default_authority", self.authority)]
        return [
            *unread,
            *authority,
            ("grpc.service_config", service_config(service)),
            ("grpc.enable_retries", int(self.retries)),
            ("grpc.keepalive_time_ms", round(self.keepalive_s * 1000)),
            ("grpc.keepalive_timeout_ms", round(self.keepalive_timeout_s * 1000)),
            # gRPC waits for the longer of the keepalive's time-out and this one, by default a minute.
            ("grpc.http2.ping_timeout_ms", round(self.keepalive_timeout_s * 1000)),
            # By default only two pings are sent until the client sends data, and long streams only read.
            ("grpc.http2.max_pings_without_data", 0),
            # A server that accepts connections but never answers would hold each attempt for 20 s.
            ("grpc.min_reconnect_backoff_ms", round(self.connect_timeout_s * 1000)),
            ("grpc.initial_reconnect_backoff_ms", _FIRST_RECONNECT_MS),
            ("grpc.max_reconnect_backoff_ms", _LONGEST_RECONNECT_MS),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
        ]


def service_config(service: descriptor.ServiceDescriptor) -> str:
    """Return gRPC's service config: round robin over a name's addresses, and retries."""
    return json.dumps(
        {
            "loadBalancingConfig": [{"round_robin": {}}],
            "methodConfig": [{"name": [{"service": service.full_name}], "retryPolicy": RETRY_POLICY}],
        }
    )


def as_sent(request: coordinator_pb2.GenerateRequest) -> coordinator_pb2.GenerateRequest:
    """The request with prompt_logprobs_in_parts set if it wants a prompt's log-probabilities."""
    if not request.sampling.HasField("prompt_logprobs") or request.prompt_logprobs_in_parts:
        return request
    sent = coordinator_pb2.GenerateRequest(prompt_logprobs_in_parts=True)
    sent.MergeFrom(request)
    return sent


def check_started(request: coordinator_pb2.GenerateRequest, chunk: coordinator_pb2.GenerateResponse) -> None:
    """Raise FailedPrecondition if an older server has ignored the request's constraint or salt."""
    if not chunk.HasField("started"):
        return
    if request.sampling.HasField("constraint") and not chunk.started.is_constrained:
        message = "the server does not support constraints: update it, or leave the constraint out"
        raise FailedPrecondition(f"sampling.constraint: {message}", reason="CONSTRAINTS_UNKNOWN")
    if request.cache_salt and not chunk.started.is_salted:
        message = "the server does not support salts, so other requests share its cached prefixes: update it"
        raise FailedPrecondition(f"cache_salt: {message}", reason="CACHE_SALT_UNKNOWN")


class Client:
    """Calls coordinators. Use as an async context manager, inside one event loop.

    `address` is host:port, or a gRPC name with several addresses, such as dns:///coordinators:50051.
    Every method raises the typed errors of `specdec.wire.errors`.
    """

    def __init__(self, address: str, settings: ClientSettings | None = None) -> None:
        self.address = address
        self._settings = settings or ClientSettings()
        self._channel = self._open_channel()
        # Stubs are made here: one that is made over a closed channel never returns.
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        self._stub = coordinator_pb2_grpc.CoordinatorServiceStub(parsing(self._channel))

    def _open_channel(self) -> grpc.aio.Channel:
        options, credentials = self._settings.channel_options(), self._settings.credentials()
        if credentials is None:
            return grpc.aio.insecure_channel(self.address, options=options)
        return grpc.aio.secure_channel(self.address, credentials, options=options)

    def on_behalf_of(self, metadata: tuple[tuple[str, str], ...]) -> Client:
        """The same connection for another caller, with `metadata` instead of the settings' metadata and key.

        Closing this client ends the calls of both; do not close the other one.
        """
        other = copy.copy(self)
        other._settings = replace(self._settings, metadata=metadata, api_key=None)
        return other

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace_s: float | None = None) -> None:
        """Close the channel; running calls are cancelled after `grace_s`, by default at once. New calls are refused."""
        await self._channel.close(grace_s)

    async def generate(
        self, request: coordinator_pb2.GenerateRequest
    ) -> AsyncGenerator[coordinator_pb2.GenerateResponse, None]:
        """Yield the chunks of a request. Leaving the iteration (`aclose`) cancels the request."""
        request = as_sent(request)
        self._settings.check_size(request)
        try:
            call = self._stub.Generate(
                request, timeout=self._settings.timeout_s, metadata=self._settings.call_metadata()
            )
        except grpc.aio.UsageError:
            raise Unavailable("the connection was closed", reason=CUT_OFF) from None
        try:
            async for chunk in call:
                told = parsed(chunk)
                check_started(request, told)
                yield told
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, is_own_end=False) from error
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            # The channel was closed, as when its connection is replaced: the request may go on elsewhere.
            raise Unavailable("the connection was closed", reason=CUT_OFF) from None
        finally:
            call.cancel()

    async def complete(self, request: coordinator_pb2.GenerateRequest) -> Completion:
        """Return the whole answer to a request."""
        completion = Completion()
        async for chunk in self.generate(request):
            completion.add(chunk)
        return completion

    async def abort(self, request_id: str) -> bool:
        """End a running request; return False if there is none."""
        request = coordinator_pb2.AbortRequest(request_id=request_id)
        return (await self._call(self._stub.Abort, request)).aborted

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        request = coordinator_pb2.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list((await self._call(self._stub.Tokenize, request)).token_ids)

    async def tokenize_chat(
        self, messages: coordinator_pb2.ChatMessages, *, add_special_tokens: bool = False
    ) -> list[int]:
        """Return the token ids of a conversation, as a request with it would have. See `chat_messages`."""
        request = coordinator_pb2.TokenizeRequest(messages=messages, add_special_tokens=add_special_tokens)
        return list((await self._call(self._stub.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        request = coordinator_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return (await self._call(self._stub.Detokenize, request)).text

    async def model_info(self, *, with_tokenizer: bool = False) -> coordinator_pb2.GetModelInfoResponse:
        """Return the served model; `with_tokenizer` adds the tokenizer's special tokens and chat template."""
        request = coordinator_pb2.GetModelInfoRequest(with_tokenizer=with_tokenizer)
        return await self._call(self._stub.GetModelInfo, request)

    async def status(self) -> coordinator_pb2.GetStatusResponse:
        """Return replicas, load and limits."""
        return await self._call(self._stub.GetStatus, coordinator_pb2.GetStatusRequest())

    async def is_serving(self, timeout_s: float = 1.0) -> bool:
        """Whether the coordinator reports SERVING; False if it does not answer within `timeout_s` or before `close`."""
        try:
            answer = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError):
            return False
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    @property
    def is_connected(self) -> bool:
        """Whether a connection is up. One that is not is then tried."""
        return self._channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY

    async def is_deaf(self, timeout_s: float) -> bool:
        """Whether a coordinator answers nothing within `timeout_s`, not even an error, over a connection that is up."""
        try:
            if not self.is_connected:
                return False
            await self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        except grpc.aio.UsageError:
            return False
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
        return False

    async def call(self, method: str, request: Message) -> Any:
        """Call a unary method of the service by name, such as Tokenize."""
        return await self._call(getattr(self._stub, method), request)

    async def _call(self, method: Callable[..., Awaitable[_T]], request: Message) -> _T:
        """Raises the typed errors of `specdec.wire.errors`."""
        self._settings.check_size(request)
        try:
            answer = method(request, timeout=self._settings.timeout_s, metadata=self._settings.call_metadata())
            return parsed(await answer)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, is_own_end=False) from error
        except grpc.aio.UsageError:
            raise Unavailable("the connection was closed", reason=CUT_OFF) from None
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise Unavailable("the connection was closed", reason=CUT_OFF) from None


def _is_cancelled() -> bool:
    """Whether this task is to end; else something that it waited for was cancelled."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


@dataclass(slots=True)
class CompletedChoice:
    """The output of one choice so far."""

    text: str = ""
    tokens: list[coordinator_pb2.OutputToken] = field(default_factory=list)
    steps: list[coordinator_pb2.DecodingStep] = field(default_factory=list)
    """The steps that committed them, if the request wants steps."""
    finished: coordinator_pb2.ChoiceFinished | None = None

    @property
    def token_ids(self) -> list[int]:
        """Ids of the output tokens."""
        return [token.id for token in self.tokens]


@dataclass(slots=True)
class Completion:
    """The answer to a request so far. Times in seconds since the object was made."""

    started: coordinator_pb2.GenerateStarted | None = None
    prompt_logprobs: coordinator_pb2.PromptLogprobs | None = None
    """All chunks of prompt log-probabilities, joined."""
    choices: dict[int, CompletedChoice] = field(default_factory=dict)
    finished: coordinator_pb2.GenerateFinished | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_first_tokens: int = 0
    """Tokens in the first chunk with tokens, which does not count for the decoding speed."""
    _begin_s: float = field(default_factory=time.perf_counter)

    def add(self, chunk: coordinator_pb2.GenerateResponse) -> None:
        """Add the next chunk."""
        match chunk.WhichOneof("chunk"):
            case "started":
                self.started = chunk.started
            case "prompt_logprobs":
                self._add_prompt(chunk.prompt_logprobs)
            case "delta":
                self._add_delta(chunk.delta)
            case "choice_finished":
                self._choice(chunk.choice_finished.index).finished = chunk.choice_finished
            case "finished":
                self.finished = chunk.finished

    @property
    def prompt_logprobs_position(self) -> int:
        """Position below which the prompt's log-probabilities have come; 0 if none have."""
        prompt = self.prompt_logprobs
        return 0 if prompt is None else prompt.start_position + len(prompt.token_ids)

    def _add_prompt(self, more: coordinator_pb2.PromptLogprobs) -> None:
        if self.prompt_logprobs is None:
            self.prompt_logprobs = coordinator_pb2.PromptLogprobs(start_position=more.start_position)
        self.prompt_logprobs.token_ids.extend(more.token_ids)
        self.prompt_logprobs.positions.extend(more.positions)

    def _add_delta(self, delta: coordinator_pb2.ChoiceDelta) -> None:
        choice = self._choice(delta.index)
        choice.text += delta.text
        choice.tokens.extend(delta.tokens)
        choice.steps.extend(delta.steps)
        if delta.tokens:
            self.last_token_s = time.perf_counter() - self._begin_s
            if self.first_token_s is None:
                self.first_token_s = self.last_token_s
                self.num_first_tokens = len(delta.tokens)

    def _choice(self, index: int) -> CompletedChoice:
        return self.choices.setdefault(index, CompletedChoice())

    @property
    def num_tokens(self) -> int:
        """Output tokens of all choices."""
        return sum(len(choice.tokens) for choice in self.choices.values())

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed without the first chunk (prefill); None if no chunk followed it."""
        if self.first_token_s is None or self.last_token_s is None or self.last_token_s <= self.first_token_s:
            return None
        return (self.num_tokens - self.num_first_tokens) / (self.last_token_s - self.first_token_s)

    @property
    def identity(self) -> list[tuple[int, list[int], str]]:
        """Index, token ids and text of every choice: equal runs have equal identities."""
        return [(index, choice.token_ids, choice.text) for index, choice in sorted(self.choices.items())]

    def require_finished(self) -> coordinator_pb2.GenerateFinished:
        """Return the last chunk. Raises Internal if the stream ended without it."""
        if self.finished is None:
            raise Internal("the stream ended without its last chunk", reason="STREAM_INCOMPLETE")
        return self.finished
