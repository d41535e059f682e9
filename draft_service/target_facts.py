"""Asks the target for its identity (token ids, context length) and its tokenizer."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import grpc
import structlog

from specdec.config import DraftSettings
from specdec.v1 import common_pb2 as pb
from specdec.v1 import target_pb2_grpc
from specdec.wire.backoff import Backoff
from specdec.wire.channel import open_channel

_MAX_TOKENIZER_BYTES = 256 * 2**20
_CALL_S = 30.0
_WAIT = Backoff(0.25, 5.0)
_PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_log = structlog.get_logger("specdec.draft")


class NoTargetFacts(Exception):
    """The target did not answer, or its answer is unusable. The message is for operators."""


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """A target's identity and tokenizer."""

    identity: pb.ModelIdentity
    tokenizer_json: str


def ask_target(settings: DraftSettings) -> TargetFacts:
    """Ask the target of the settings; wait for it for up to `load_timeout_s`.

    Raises NoTargetFacts, or TlsFilesBroken if the TLS files of the settings cannot be used.
    """
    return asyncio.run(_ask(settings))


async def _ask(settings: DraftSettings) -> TargetFacts:
    address = settings.target or ""
    ends_at_s = time.monotonic() + settings.load_timeout_s
    channel = open_channel(address, settings)
    try:
        num_failures = 0
        while True:
            try:
                return await _once(channel, settings)
            except grpc.aio.AioRpcError as error:
                num_failures += 1
                wait_s = _WAIT.wait_s(num_failures)
                if error.code() not in _PASSING or time.monotonic() + wait_s > ends_at_s:
                    raise NoTargetFacts(f"target: {address} answers {error.code().name}") from None
                _log.info("waiting_for_target", address=address, code=error.code().name)
                await asyncio.sleep(wait_s)
    finally:
        await channel.close()


async def _once(channel: grpc.aio.Channel, settings: DraftSettings) -> TargetFacts:
    stub = target_pb2_grpc.TargetServiceStub(channel)
    info = await stub.GetReplicaInfo(pb.GetReplicaInfoRequest(), timeout=_CALL_S)
    asked = pb.GetTokenizerRequest(max_message_bytes=settings.max_message_bytes)
    content = bytearray()
    async for piece in stub.GetTokenizer(asked, timeout=_CALL_S):
        content += piece.tokenizer_json
        if len(content) > _MAX_TOKENIZER_BYTES:
            raise NoTargetFacts(f"target: its tokenizer has more than {_MAX_TOKENIZER_BYTES} bytes")
    identity = info.identity
    if not identity.vocab_size or identity.max_model_len < 2:
        raise NoTargetFacts("target: its answer lacks vocab_size or max_model_len")
    try:
        return TargetFacts(identity, content.decode())
    except UnicodeDecodeError:
        raise NoTargetFacts("target: its tokenizer is not UTF-8") from None
