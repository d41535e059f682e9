"""An engine that echoes messages, and on command sends any frame, or bytes that are no frame."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from specdec.replica.bridge.frames import EnginePort, FrameKind
from specdec.v1 import common_pb2
from tests.support.services.echo_service import EchoSettings

if TYPE_CHECKING:
    import grpc

SAY = b"say:"
"""Prefix of a message with the kind, stream and payload of a frame that the engine is to send."""
SAY_RAW = b"raw:"
"""Prefix of a message with bytes that the engine is to write to the socket."""
TOKENIZER = b"t" * 100
_HEAD = struct.Struct("<BI")


def say(kind: int, stream_id: int, payload: bytes) -> bytes:
    """The message that makes the engine send a frame."""
    return SAY + _HEAD.pack(kind, stream_id) + payload


def run_engine(port: EnginePort, settings: EchoSettings) -> None:
    """Echo messages and run commands, until shutdown."""
    tokenizer = common_pb2.GetTokenizerResponse(tokenizer_json=TOKENIZER, tokenizer_config="{}")
    port.send(FrameKind.TOKENIZER, payload=tokenizer.SerializeToString())
    info = common_pb2.GetReplicaInfoResponse(identity=common_pb2.ModelIdentity(name="liar", vocab_size=32))
    port.send(FrameKind.READY, payload=info.SerializeToString())
    while True:
        for frame in port.poll(None):
            if frame.kind is FrameKind.SHUTDOWN:
                return
            if frame.kind is not FrameKind.MESSAGE:
                continue
            if frame.payload.startswith(SAY_RAW):
                port._connection.sendall(frame.payload[len(SAY_RAW) :])
            elif frame.payload.startswith(SAY):
                kind, stream_id = _HEAD.unpack_from(frame.payload, len(SAY))
                payload = frame.payload[len(SAY) + _HEAD.size :]
                port.send(kind, stream_id, payload)
            else:
                port.send(FrameKind.MESSAGE, frame.stream_id, frame.payload)


@asynccontextmanager
async def lying_replica() -> AsyncIterator[grpc.aio.Channel]:
    """Run a replica's servicer in this process, with this engine in another one; yields a channel to it."""
    import grpc
    from prometheus_client import CollectorRegistry

    from specdec.replica.bridge.replica_service import ReplicaRole, ReplicaService
    from specdec.service.server import build_server
    from tests.support.services.echo_process import SERVICE

    role = ReplicaRole(
        name="target",
        grpc_name=SERVICE,
        stream_method="Verify",
        engine_entry="tests.support.services.lying_engine:run_engine",
        serves_tokenizer=True,
    )
    settings = EchoSettings(host="127.0.0.1", port=0, metrics_port=None, log_level="warning")
    service = ReplicaService(role, settings, CollectorRegistry())
    server, port = build_server(settings, tls=None)
    service.register(server)
    await server.start()
    try:
        await service.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(0)
        await service.stop()
