"""The client for code without an event loop, or inside a running one (a notebook)."""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.client.completion import Completion, as_sent, check_started
from specdec.client.resuming import ResumePolicy, Resumption
from specdec.client.settings import ClientSettings, check_address
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import coordinator_pb2_grpc
from specdec.wire.errors import Cancelled, Unavailable, from_rpc_error
from specdec.wire.parsing.reading import parsed, parsing

_T = TypeVar("_T")


class ChunkStream(Iterator[api.GenerateResponse]):
    """The chunks of one request, for a plain `for`. The request is sent when the first chunk is read.

    `close`, the end of a `with` over the stream or its client, and garbage collection cancel it. One thread iterates,
    any thread may close: the iterating thread then gets Cancelled, so a part is never taken for the whole.
    """

    def __init__(self, running: _RunningCall, chunks: Iterator[api.GenerateResponse]) -> None:
        self._running = running
        self._chunks = chunks

    def __iter__(self) -> ChunkStream:
        return self

    def __next__(self) -> api.GenerateResponse:
        """Return the next chunk. Raises the typed errors of `specdec.wire.errors`."""
        if self._running.is_ended:
            raise Cancelled("the stream is closed")
        return next(self._chunks)

    def __enter__(self) -> ChunkStream:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the request if it still runs."""
        self._running.end()


class SyncClient:
    """Calls coordinators and waits for their answers: `specdec.client.Client` for plain functions.

    Use as a context manager. Threads may share one. It has no event loop, so it works beside and inside a running one,
    which it blocks. `address` and errors are those of `Client`.
    """

    def __init__(self, address: str, settings: ClientSettings | None = None) -> None:
        check_address(address)
        self.address = address
        self._settings = settings or ClientSettings()
        options, credentials = self._settings.channel_options(), self._settings.credentials()
        self._channel: grpc.Channel = (
            grpc.insecure_channel(address, options=options)
            if credentials is None
            else grpc.secure_channel(address, credentials, options=options)
        )
        self._stub = coordinator_pb2_grpc.CoordinatorServiceStub(parsing(self._channel))
        self._calls: weakref.WeakSet[_RunningCall] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._is_closed = False

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self, grace_s: float | None = None) -> None:
        """Close the channel; running streams are cancelled after `grace_s`, by default at once.

        New ones are refused.
        """
        with self._lock:
            self._is_closed = True
            calls = list(self._calls)
        until_s = time.monotonic() + (grace_s or 0.0)
        for call in calls:
            call.wait_idle(until_s - time.monotonic())
        for call in calls:
            call.end()
        self._channel.close()

    def generate(self, request: api.GenerateRequest) -> ChunkStream:
        """Return the chunks of a request."""
        running = self._running_call()
        return ChunkStream(running, _chunks(running, request))

    def generate_resuming(self, request: api.GenerateRequest, policy: ResumePolicy | None = None) -> ChunkStream:
        """Return the chunks of a request as if its stream had never been interrupted: see `generate_resuming`."""
        running = self._running_call()
        return ChunkStream(running, _resumed_chunks(running, Resumption(request, policy)))

    def complete(self, request: api.GenerateRequest) -> Completion:
        """Return the whole answer to a request."""
        completion = Completion()
        with self.generate(request) as stream:
            for chunk in stream:
                completion.add(chunk)
        return completion

    def abort(self, request_id: str) -> bool:
        """End a running request; return False if there is none."""
        return self._call(self._stub.Abort, api.AbortRequest(request_id=request_id)).aborted

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        request = api.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list(self._call(self._stub.Tokenize, request).token_ids)

    def tokenize_chat(self, messages: api.ChatMessages, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a conversation, as a request with it would have. See `chat_messages`."""
        request = api.TokenizeRequest(messages=messages, add_special_tokens=add_special_tokens)
        return list(self._call(self._stub.Tokenize, request).token_ids)

    def detokenize(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        request = api.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return self._call(self._stub.Detokenize, request).text

    def model_info(self, *, with_tokenizer: bool = False) -> api.GetModelInfoResponse:
        """Return the served model; `with_tokenizer` adds the tokenizer's special tokens and chat template."""
        return self._call(self._stub.GetModelInfo, api.GetModelInfoRequest(with_tokenizer=with_tokenizer))

    def status(self) -> api.GetStatusResponse:
        """Return replicas, load and limits."""
        return self._call(self._stub.GetStatus, api.GetStatusRequest())

    def is_serving(self, timeout_s: float = 1.0) -> bool:
        """Whether the coordinator reports SERVING; False if it does not answer within `timeout_s`."""
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def call(self, method: str, request: Message) -> Any:
        """Call a unary method of the service by name, such as Tokenize."""
        return self._call(getattr(self._stub, method), request)

    def on_behalf_of(self, metadata: tuple[tuple[str, str], ...]) -> SyncClient:
        """The same connection for another caller, with `metadata` instead of the settings' metadata and key.

        Closing this client ends the calls of both; do not close the other one.
        """
        other = copy.copy(self)
        other._settings = dataclasses.replace(self._settings, metadata=metadata, api_key=None)
        return other

    def _running_call(self) -> _RunningCall:
        running = _RunningCall(self._start)
        with self._lock:
            if self._is_closed:
                raise Cancelled("the client is closed")
            self._calls.add(running)
        return running

    def _start(self, request: api.GenerateRequest) -> Any:
        request = as_sent(request)
        self._settings.check_size(request)
        return self._stub.Generate(request, timeout=self._settings.timeout_s, metadata=self._settings.call_metadata())

    def _call(self, method: Callable[..., _T], request: Message) -> _T:
        self._settings.check_size(request)
        try:
            return parsed(method(request, timeout=self._settings.timeout_s, metadata=self._settings.call_metadata()))
        except grpc.RpcError as error:
            raise from_rpc_error(error, is_own_end=self._is_closed) from error


class _RunningCall:
    """A stream's running attempt, if any. It has no reference to the stream, so unused streams are collected."""

    def __init__(self, start: Callable[[api.GenerateRequest], Any]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._idle = threading.Event()
        """Set while no attempt runs."""
        self._idle.set()
        self._call: Any = None

    @property
    def is_ended(self) -> bool:
        return self._ended.is_set()

    def start(self, request: api.GenerateRequest) -> Any:
        """Begin an attempt. Raises Cancelled after `end`."""
        with self._lock:
            if self.is_ended:
                raise Cancelled("the stream is closed")
            self._call = self._start(request)
            self._idle.clear()
            return self._call

    def wait_idle(self, wait_s: float) -> None:
        """Return when no attempt runs, or after `wait_s`."""
        self._idle.wait(max(0.0, wait_s))

    def stop(self) -> None:
        """End the attempt, and cancel the rest of it."""
        self._call.cancel()
        self._idle.set()

    def wait(self, wait_s: float) -> None:
        """Return after `wait_s`, or when `end` is called."""
        self._ended.wait(wait_s)

    def end(self) -> None:
        """Cancel the running attempt, and let no further one begin."""
        with self._lock:
            self._ended.set()
            if self._call is not None:
                self._call.cancel()


def _chunks(running: _RunningCall, request: api.GenerateRequest) -> Iterator[api.GenerateResponse]:
    call = running.start(request)
    try:
        for chunk in call:
            told = parsed(chunk)
            check_started(request, told)
            yield told
    except grpc.RpcError as error:
        raise from_rpc_error(error, is_own_end=running.is_ended) from error
    finally:
        running.stop()


def _resumed_chunks(running: _RunningCall, resumption: Resumption) -> Iterator[api.GenerateResponse]:
    while True:
        try:
            for chunk in _chunks(running, resumption.body()):
                if (new := resumption.unseen(chunk)) is not None:
                    yield new
            return
        except Unavailable as error:
            wait_s = resumption.wait_after(error)
        running.wait(wait_s)
