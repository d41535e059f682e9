"""A small typed client of the coordinator."""

from __future__ import annotations

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
from specdec.wire.errors import FailedPrecondition, Internal, InvalidRequest, from_rpc_error
from specdec.wire.reading import parsed, parsing

_T = TypeVar("_T")
# Waits between attempts to connect; gRPC's own grow to two minutes, over which a coordinator that is back is not seen.
# Shorter than the attempts of a call together: one that is back is found before another that goes has refused them all.
_FIRST_RECONNECT_MS = 100
_LONGEST_RECONNECT_MS = 1000

# gRPC retries by itself what was refused or never reached a server, unless the server says that this is of no use
# (see specdec.wire.abort). A server that stops cuts off what it has not looked at, as CANCELLED. A stream is
# retried only before its first chunk, so no token is ever delivered twice.
RETRY_POLICY = {
    "maxAttempts": 5,
    "initialBackoff": "0.1s",
    "maxBackoff": "2s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """How to reach the coordinator. Times in seconds."""

    timeout_s: float | None = None
    """Deadline of one call; the server learns it and stops working for a call that has passed it."""
    keepalive_s: float = 3.0
    """Ping a silent server after this long, while calls run. Coordinators take pings down to one a second; what stands
    between may demand more time, and closes the connection else."""
    keepalive_timeout_s: float = 3.0
    """A server that owes the answer to a ping this long is gone: its calls end UNAVAILABLE."""
    connect_timeout_s: float = 5.0
    """Longest attempt to connect to one address; then the next is tried."""
    max_message_bytes: int = 16 * 1024 * 1024
    tls: bool = False
    """Use TLS. Certificates, below, turn it on as well."""
    root_certificates: bytes | None = None
    """PEM authorities that the server's certificate must come from; None: those that gRPC trusts, which are a list of
    its own or the file that the variable GRPC_DEFAULT_SSL_ROOTS_FILE_PATH names."""
    client_certificate: tuple[bytes, bytes] | None = None
    """PEM key and certificate chain, for mutual TLS."""
    metadata: tuple[tuple[str, str], ...] = ()
    api_key: str | None = field(default=None, repr=False)
    """Sent with every call, as `authorization: Bearer KEY`; without TLS anyone on the way can read it."""

    def call_metadata(self) -> tuple[tuple[str, str], ...]:
        """What is sent beside every request: the caller's span in OpenTelemetry's current context included."""
        own = () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)
        trace: dict[str, str] = {}
        if all(name != "traceparent" for name, _ in self.metadata):
            TraceContextTextMapPropagator().inject(trace)
        return (*self.metadata, *own, *trace.items())

    def credentials(self) -> grpc.ChannelCredentials | None:
        """What a TLS channel is opened with; None: without TLS."""
        if not (self.tls or self.root_certificates or self.client_certificate):
            return None
        key, chain = self.client_certificate or (None, None)
        return grpc.ssl_channel_credentials(self.root_certificates, key, chain)

    def check_size(self, request: Message) -> None:
        """Raises InvalidRequest when a request is larger than `max_message_bytes`."""
        # gRPC itself would answer RESOURCE_EXHAUSTED, as if trying again could help.
        num_bytes, most = request.ByteSize(), self.max_message_bytes
        if num_bytes > most:
            raise InvalidRequest("request", f"{num_bytes} bytes are more than the limit of {most}")

    def channel_options(self) -> list[tuple[str, str | int]]:
        """Options of the gRPC channel: retries, keepalive, message limits."""
        service = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]
        return [
            ("grpc.service_config", service_config(service)),
            ("grpc.keepalive_time_ms", round(self.keepalive_s * 1000)),
            ("grpc.keepalive_timeout_ms", round(self.keepalive_timeout_s * 1000)),
            # A ping of keepalive is given up after the longer of its own time-out and this: a minute by default.
            ("grpc.http2.ping_timeout_ms", round(self.keepalive_timeout_s * 1000)),
            # By default only two pings go out until the client sends something: long streams are what it reads.
            ("grpc.http2.max_pings_without_data", 0),
            # A server that takes connections and never answers would hold each attempt for 20 s.
            ("grpc.min_reconnect_backoff_ms", round(self.connect_timeout_s * 1000)),
            ("grpc.initial_reconnect_backoff_ms", _FIRST_RECONNECT_MS),
            ("grpc.max_reconnect_backoff_ms", _LONGEST_RECONNECT_MS),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
        ]


def service_config(service: descriptor.ServiceDescriptor) -> str:
    """Return the gRPC service config: calls take turns among the addresses of a name, and are retried."""
    return json.dumps(
        {
            "loadBalancingConfig": [{"round_robin": {}}],
            "methodConfig": [{"name": [{"service": service.full_name}], "retryPolicy": RETRY_POLICY}],
        }
    )


def as_sent(request: coordinator_pb2.GenerateRequest) -> coordinator_pb2.GenerateRequest:
    """A request as clients send it, which take long log-probabilities of a prompt in parts."""
    if not request.sampling.HasField("prompt_logprobs") or request.prompt_logprobs_in_parts:
        return request
    sent = coordinator_pb2.GenerateRequest(prompt_logprobs_in_parts=True)
    sent.MergeFrom(request)
    return sent


def check_started(request: coordinator_pb2.GenerateRequest, chunk: coordinator_pb2.GenerateResponse) -> None:
    """Raises FailedPrecondition where a server has begun without a request's constraint or salt: it knows of none."""
    if not chunk.HasField("started"):
        return
    if request.sampling.HasField("constraint") and not chunk.started.is_constrained:
        message = "the server knows no constraints: its output would be whatever the model says"
        raise FailedPrecondition(f"sampling.constraint: {message}", reason="CONSTRAINTS_UNKNOWN")
    if request.cache_salt and not chunk.started.is_salted:
        message = "the server knows none: others could find out what is asked for"
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
        self._stub = coordinator_pb2_grpc.CoordinatorServiceStub(parsing(self._channel))

    def _open_channel(self) -> grpc.aio.Channel:
        options, credentials = self._settings.channel_options(), self._settings.credentials()
        if credentials is None:
            return grpc.aio.insecure_channel(self.address, options=options)
        return grpc.aio.secure_channel(self.address, credentials, options=options)

    def on_behalf_of(self, metadata: tuple[tuple[str, str], ...]) -> Client:
        """The same connection for another caller: this metadata goes along in place of what the settings have.

        Calls of both end when this one is closed; the other is not to be closed.
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
        """Close the channel; running calls are cancelled, at once or after `grace_s`. New ones are not taken."""
        await self._channel.close(grace_s)

    async def generate(
        self, request: coordinator_pb2.GenerateRequest
    ) -> AsyncGenerator[coordinator_pb2.GenerateResponse, None]:
        """Yield the chunks of a request. Leaving the iteration (`aclose`) cancels the request."""
        request = as_sent(request)
        self._settings.check_size(request)
        call = self._stub.Generate(request, timeout=self._settings.timeout_s, metadata=self._settings.call_metadata())
        try:
            async for chunk in call:
                told = parsed(chunk)
                check_started(request, told)
                yield told
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, is_own_end=False) from error
        finally:
            call.cancel()

    async def complete(self, request: coordinator_pb2.GenerateRequest) -> Completion:
        """Return the whole answer to a request."""
        completion = Completion()
        async for chunk in self.generate(request):
            completion.add(chunk)
        return completion

    async def abort(self, request_id: str) -> bool:
        """End a running request; return whether there was one."""
        request = coordinator_pb2.AbortRequest(request_id=request_id)
        return (await self._call(self._stub.Abort, request)).aborted

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        request = coordinator_pb2.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list((await self._call(self._stub.Tokenize, request)).token_ids)

    async def tokenize_chat(
        self, messages: coordinator_pb2.ChatMessages, *, add_special_tokens: bool = False
    ) -> list[int]:
        """Return the token ids of a conversation, as a request with it would have them. See `chat_messages`."""
        request = coordinator_pb2.TokenizeRequest(messages=messages, add_special_tokens=add_special_tokens)
        return list((await self._call(self._stub.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        request = coordinator_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return (await self._call(self._stub.Detokenize, request)).text

    async def model_info(self, *, with_tokenizer: bool = False) -> coordinator_pb2.GetModelInfoResponse:
        """Return what is served; with the tokenizer's special tokens and chat template if asked for."""
        request = coordinator_pb2.GetModelInfoRequest(with_tokenizer=with_tokenizer)
        return await self._call(self._stub.GetModelInfo, request)

    async def status(self) -> coordinator_pb2.GetStatusResponse:
        """Return replicas, load and limits."""
        return await self._call(self._stub.GetStatus, coordinator_pb2.GetStatusRequest())

    async def is_serving(self, timeout_s: float = 1.0) -> bool:
        """Whether the coordinator says that it serves; False when it does not answer in time."""
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    async def call(self, method: str, request: Message) -> Any:
        """The answer of one of the service's methods that answer once, such as Tokenize, to a request as it is."""
        return await self._call(getattr(self._stub, method), request)

    async def _call(self, method: Callable[..., Awaitable[_T]], request: Message) -> _T:
        self._settings.check_size(request)
        try:
            answer = method(request, timeout=self._settings.timeout_s, metadata=self._settings.call_metadata())
            return parsed(await answer)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, is_own_end=False) from error


@dataclass(slots=True)
class CompletedChoice:
    """What has come of one choice so far."""

    text: str = ""
    tokens: list[coordinator_pb2.OutputToken] = field(default_factory=list)
    steps: list[coordinator_pb2.DecodingStep] = field(default_factory=list)
    """The steps that committed them, where they were asked for."""
    finished: coordinator_pb2.ChoiceFinished | None = None

    @property
    def token_ids(self) -> list[int]:
        """Ids of the output tokens."""
        return [token.id for token in self.tokens]


@dataclass(slots=True)
class Completion:
    """What has come of a request so far, and when. Times in seconds since the object was made."""

    started: coordinator_pb2.GenerateStarted | None = None
    prompt_logprobs: coordinator_pb2.PromptLogprobs | None = None
    """All chunks of them as one."""
    choices: dict[int, CompletedChoice] = field(default_factory=dict)
    finished: coordinator_pb2.GenerateFinished | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_first_tokens: int = 0
    """Tokens in the first chunk that had any; they do not count for the decoding speed."""
    _begin_s: float = field(default_factory=time.perf_counter)

    def add(self, chunk: coordinator_pb2.GenerateResponse) -> None:
        """Take in the next chunk."""
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
        """Below it the prompt's log-probabilities have come; 0: none have."""
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
        """Decoding speed, the first chunk (prefill) not counted; None when nothing came after it."""
        if self.first_token_s is None or self.last_token_s is None or self.last_token_s <= self.first_token_s:
            return None
        return (self.num_tokens - self.num_first_tokens) / (self.last_token_s - self.first_token_s)

    @property
    def identity(self) -> list[tuple[int, list[int], str]]:
        """What must be equal between two runs: every choice's tokens and text."""
        return [(index, choice.token_ids, choice.text) for index, choice in sorted(self.choices.items())]

    def require_finished(self) -> coordinator_pb2.GenerateFinished:
        """Return the last chunk. Raises Internal when the stream ended without one."""
        if self.finished is None:
            raise Internal("the stream ended without its last chunk", reason="STREAM_INCOMPLETE")
        return self.finished
