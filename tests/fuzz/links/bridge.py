"""Engine to servicer: frames that are whole and make no sense."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from specdec.replica.bridge.frames import FrameKind
from specdec.v1 import common_pb2 as pb
from specdec.v1 import trace_pb2
from tests.fuzz.cases import Case, Link, Run
from tests.fuzz.judge import Complaints, require, within
from tests.fuzz.mutations import mutated
from tests.support.services.echo_process import SERVICE, verify_stream
from tests.support.services.lying_engine import TOKENIZER, lying_replica, say

_MOST_S = 10.0
_KINDS = (
    FrameKind.STREAM_ABORT, FrameKind.STREAM_ABORT, FrameKind.LOAD, FrameKind.LOAD, FrameKind.READY,
    FrameKind.TOKENIZER, FrameKind.SESSION_SPAN, FrameKind.DRAINED, FrameKind.STREAM_OPENED, FrameKind.STREAM_CLOSED,
    FrameKind.STREAM_TAKEN, FrameKind.DRAIN, FrameKind.SHUTDOWN, FrameKind.MESSAGE,
)  # fmt: skip
"""FATAL is not among them: it is an engine's last word, and only words."""


def _messages() -> dict[FrameKind, Message]:
    """What a right frame of a kind has in it."""
    status = status_pb2.Status(code=code_pb2.FAILED_PRECONDITION, message="attach first")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="NOT_ATTACHED", domain="specdec"))
    fact = trace_pb2.SpanAttribute(key="a", integer=1)
    span = trace_pb2.Span(name="decode", start_unix_ns=1, end_unix_ns=2, attributes=[fact])
    return {
        FrameKind.STREAM_ABORT: status,
        FrameKind.LOAD: pb.LoadReport(num_running=1, kv_blocks_total=9),
        FrameKind.READY: pb.GetReplicaInfoResponse(identity=pb.ModelIdentity(name="liar", vocab_size=32)),
        FrameKind.TOKENIZER: pb.GetTokenizerResponse(tokenizer_json=b"x", tokenizer_config="y"),
        FrameKind.SESSION_SPAN: trace_pb2.SessionSpan(traceparent="00-" + "1" * 32 + "-" + "1" * 16 + "-01", span=span),
    }


class Engine:
    """Streams at a replica whose engine says what the streams tell it to."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._messages = _messages()
        self._good = verify_stream(channel)
        self._num_echoes = 0

    async def try_one(self, case: Case) -> None:
        """A frame that makes no sense; it may end the stream it is of, with a type, and nothing else."""
        rng = case.rng
        kind, payload = self._frame(rng, case)
        call = verify_stream(self._channel)
        await self._echo(call, b"here")
        own = self._num_opened + 1
        stream_id = rng.choice([0, own, own + 1000, 2**32 - 1])
        case.what.append(f"{kind.name} of {stream_id}")
        self._num_opened += 1
        await call.write(say(kind, stream_id, payload))
        await self.check_good()
        is_its_own = stream_id == own and kind in (FrameKind.STREAM_ABORT, FrameKind.MESSAGE)
        if not is_its_own:
            await within(_MOST_S, self._echo(call, b"still here"), "the stream that told the engine what to say")
        elif kind is FrameKind.STREAM_ABORT:
            await within(_MOST_S, self._ended(call), "the end of the stream")
        call.cancel()

    _num_opened = 1

    async def check_good(self) -> None:
        """The stream beside is served, and so is whoever asks what the replica is. Raises Fault."""
        self._num_echoes += 1
        await within(_MOST_S, self._echo(self._good, b"hello %d" % self._num_echoes), "the stream beside")
        ask: Any = self._channel.unary_unary(
            f"/{SERVICE}/GetReplicaInfo", response_deserializer=pb.GetReplicaInfoResponse.FromString
        )
        info = await within(_MOST_S, ask(b""), "GetReplicaInfo")
        require(info.identity.name == "liar" and info.identity.vocab_size == 32, f"the replica is {info.identity}")
        fetch: Any = self._channel.unary_stream(
            f"/{SERVICE}/GetTokenizer", response_deserializer=pb.GetTokenizerResponse.FromString
        )
        pieces = [piece async for piece in fetch(b"")]
        require(b"".join(piece.tokenizer_json for piece in pieces) == TOKENIZER, "the tokenizer is another")

    def _frame(self, rng: random.Random, case: Case) -> tuple[FrameKind, bytes]:
        kind = rng.choice(_KINDS)
        if kind in self._messages and rng.random() < 0.8:
            mutation = mutated(rng, self._messages[kind])
            case.what.append(mutation.what)
            return kind, case.sent(mutation.apply())
        return kind, case.sent(rng.randbytes(rng.choice([0, 1, 8, 500])))

    @staticmethod
    async def _echo(call: Any, payload: bytes) -> None:
        await call.write(payload)
        require(await call.read() == payload, "another echo")

    @staticmethod
    async def _ended(call: Any) -> None:
        """The engine ended it; the status is the engine's, as far as it is one."""
        try:
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            require(error.code() is not grpc.StatusCode.UNKNOWN, f"{error.code()}: {error.details()}")
            return
        raise AssertionError("a stream that the engine ended went well")


@asynccontextmanager
async def opened(complaints: Complaints) -> AsyncIterator[Run]:
    """A replica's servicer in this process, its engine in another one."""
    async with lying_replica() as channel:
        engine = Engine(channel)
        await engine.check_good()

        async def run(case: Case) -> None:
            await engine.try_one(case)

        yield run
        await engine.check_good()


LINK = Link("engine-servicer", opened)
