"""A direct client of a replica, which sends what a coordinator sends, or should not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from specdec.wire.errors import SpecdecError, from_rpc_error

PROMPT = list(range(10, 40))
MAX_TOKENS = 40


def open_session(**fields: Any) -> pb.OpenSession:
    """A session of `PROMPT` that decodes to `MAX_TOKENS`; `fields` replace its fields."""
    body = pb.OpenSession(
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        sampling=pb.TokenSampling(
            temperature=1.0, top_p=1.0, repetition_penalty=1.0, seed=5, max_tokens=MAX_TOKENS, ignore_eos=True
        ),
        speculate=True,
        credit_position=len(PROMPT),  # the target waits after its first token
    )
    body.MergeFrom(pb.OpenSession(**fields))
    return body


@dataclass(frozen=True)
class Wire:
    """Stub, method and messages of a role's stream."""

    stub: Callable[[grpc.aio.Channel], Any]
    method: str
    request: type[Any]
    entry: type[Any]


WIRES = {
    "target": Wire(target_pb2_grpc.TargetServiceStub, "Verify", target_pb2.VerifyRequest, target_pb2.TargetEntry),
    "draft": Wire(draft_pb2_grpc.DraftServiceStub, "Draft", draft_pb2.DraftRequest, draft_pb2.DraftEntry),
}


class Peer:
    """Acts as a coordinator with one session, and sends only what a test asks for."""

    def __init__(self, channel: grpc.aio.Channel, wire: Wire, owner_id: str) -> None:
        self.call = getattr(wire.stub(channel), wire.method)()
        self.epoch = 1
        self._wire = wire
        self._owner_id = owner_id
        self._results: list[Any] = []

    async def attach(self) -> pb.Attached:
        """Attach, and read the answer."""
        attach = pb.Attach(owner_id=self._owner_id, lease_generation=1)
        await self.call.write(self._wire.request(attach=attach))
        return (await self.call.read()).attached

    async def send(self, **body: Any) -> None:
        """Send one entry of the session."""
        session_id = f"{self._owner_id}/session"
        entry = self._wire.entry(session_id=session_id, epoch=self.epoch, **body)
        await self.call.write(self._wire.request(entries=[entry]))

    async def next(self, kind: str) -> Any:
        """The next result of a kind; others are skipped, but an error fails the test."""
        while True:
            while not self._results:
                frame = await self.call.read()
                assert frame is not grpc.aio.EOF
                self._results.extend(frame.results)
            result = self._results.pop(0)
            if result.WhichOneof("result") in (kind, "error"):
                assert result.WhichOneof("result") == kind, result
                return getattr(result, kind)

    async def refusal(self) -> SpecdecError:
        """The error with which the replica ends the stream."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await self.call.read() is not grpc.aio.EOF:
                pass
            trailing = await self.call.trailing_metadata()
            raise grpc.aio.AioRpcError(await self.call.code(), trailing, trailing, await self.call.details())
        return from_rpc_error(caught.value)

    async def tokens_to_the_end(self) -> list[int]:
        """Raise a target session's credit; returns its tokens to the end."""
        await self.send(credit=pb.Credit(position=10**6))
        token_ids: list[int] = []
        while True:
            verdict = await self.next("verdict")
            assert verdict.start_position == len(PROMPT) + 1 + len(token_ids)
            token_ids += verdict.token_ids
            if verdict.finish_reason:
                return token_ids
