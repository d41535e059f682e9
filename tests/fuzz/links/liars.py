"""Replicas whose messages are changed on their way out, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2, target_pb2
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.replica import ScriptedReplica
from tests.support.scripted.target import ScriptedTarget

Lie = Callable[[Message], bytes]
"""From a message to what is sent in its place."""


class Mouth:
    """What a replica says passes here; `lie` is asked about every message while there is one."""

    def __init__(self) -> None:
        self.lie: Lie | None = None
        self.num_lies = 0

    def speak(self, message: Message) -> bytes:
        """The bytes of a message, or of what is said instead."""
        said = message.SerializeToString() if self.lie is None else self.lie(message)
        self.num_lies += said != message.SerializeToString()
        return said


def _handlers(replica: ScriptedReplica, mouth: Mouth, service: str, stream: str, request: Any) -> Any:
    handlers = {
        stream: grpc.stream_stream_rpc_method_handler(
            getattr(replica, stream), request_deserializer=request.FromString, response_serializer=mouth.speak
        ),
        "GetReplicaInfo": grpc.unary_unary_rpc_method_handler(
            replica.GetReplicaInfo,
            request_deserializer=pb.GetReplicaInfoRequest.FromString,
            response_serializer=mouth.speak,
        ),
    }
    if isinstance(replica, ScriptedTarget):
        handlers["GetTokenizer"] = grpc.unary_stream_rpc_method_handler(
            replica.GetTokenizer,
            request_deserializer=pb.GetTokenizerRequest.FromString,
            response_serializer=mouth.speak,
        )
    return grpc.method_handlers_generic_handler(service, handlers)


class LyingTarget(ScriptedTarget):
    """A target with a mouth of its own."""

    def __init__(self, served: pb.ModelIdentity) -> None:
        super().__init__(served)
        self.mouth = Mouth()
        self.tokens_per_verdict = 2

    def register(self, server: grpc.aio.Server) -> None:
        """Add the handlers."""
        handlers = _handlers(self, self.mouth, "specdec.v1.TargetService", "Verify", target_pb2.VerifyRequest)
        server.add_generic_rpc_handlers((handlers,))


class LyingDraft(ScriptedDraft):
    """A draft with a mouth of its own."""

    def __init__(self, served: pb.ModelIdentity) -> None:
        super().__init__(served)
        self.mouth = Mouth()

    def register(self, server: grpc.aio.Server) -> None:
        """Add the handlers."""
        handlers = _handlers(self, self.mouth, "specdec.v1.DraftService", "Draft", draft_pb2.DraftRequest)
        server.add_generic_rpc_handlers((handlers,))


def kind_of(message: Any) -> str:
    """What a message is about: its type, or the result, the attach or the load in it."""
    if isinstance(message, target_pb2.VerifyResponse | draft_pb2.DraftResponse):
        if message.results:
            return str(message.results[0].WhichOneof("result"))
        return "attached" if message.HasField("attached") else "load"
    return type(message).__name__


def once(kind: str, after: int, change: Callable[[Message], bytes], is_victim: Callable[[str], bool]) -> Lie:
    """Change one message of a kind, after so many others of it; of results, those of a victim's session only."""
    left = after

    def lie(message: Any) -> bytes:
        nonlocal left
        results = getattr(message, "results", ())
        is_meant = kind_of(message) == kind and (not results or is_victim(results[0].session_id))
        if not is_meant or left < 0:
            return message.SerializeToString()
        left -= 1
        return change(message) if left < 0 else message.SerializeToString()

    return lie
