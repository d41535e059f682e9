"""A small typed client of the coordinator."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.client.completion import Completion, as_sent, check_started
from specdec.client.settings import ClientSettings, check_address
from specdec.v1 import coordinator_pb2, coordinator_pb2_grpc
from specdec.wire.errors import (
    CUT_OFF,
    Unavailable,
    from_rpc_error,
)
from specdec.wire.parsing.reading import parsed, parsing

_T = TypeVar("_T")


class Client:
    """Calls coordinators. Use as an async context manager, inside one event loop.

    `address` is host:port, or a gRPC name with several addresses, such as dns:///coordinators:50051.
    Every method raises the typed errors of `specdec.wire.errors`.
    """

    def __init__(self, address: str, settings: ClientSettings | None = None) -> None:
        check_address(address)
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
