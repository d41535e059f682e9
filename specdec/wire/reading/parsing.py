"""Answers that do not parse. gRPC for Python would log a traceback and hand on None in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError

from specdec.wire.errors import Internal

_T = TypeVar("_T")
_ChannelT = TypeVar("_ChannelT", grpc.Channel, grpc.aio.Channel)


class Unparsable:
    """Stands in for an answer that does not parse."""

    def __init__(self, cause: str) -> None:
        self.cause = cause
        """For people."""


def parsing(channel: _ChannelT) -> _ChannelT:
    """The channel for stubs whose answers are looked at with `parsed`; it is closed through the original."""
    return cast(_ChannelT, _ParsingChannel(channel))


def parsed(answer: _T) -> _T:
    """An answer as it came. Raises Internal where it did not parse."""
    if isinstance(answer, Unparsable):
        raise Internal(f"the answer does not parse: {answer.cause}", reason="MALFORMED_ANSWER")
    return answer


class _ParsingChannel:
    def __init__(self, channel: grpc.Channel | grpc.aio.Channel) -> None:
        self._channel = channel

    def __getattr__(self, arity: str) -> Callable[..., Any]:
        make = getattr(self._channel, arity)

        def multi_callable(path: str, *, response_deserializer: Callable[[bytes], Any], **options: Any) -> Any:
            def deserialize(data: bytes) -> Any:
                try:
                    return response_deserializer(data)
                except (DecodeError, TypeError) as error:  # there is no data where a call ended well without an answer
                    return Unparsable(str(error))

            return make(path, response_deserializer=deserialize, **options)

        return multi_callable
