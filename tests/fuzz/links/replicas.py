"""Target to coordinator and draft to coordinator: replicas that lie once, beside others that do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from tests.fuzz.cases import Case, Link, Run
from tests.fuzz.judge import Complaints, check_status, require, within
from tests.fuzz.links.liars import LyingDraft, LyingTarget, Mouth, once
from tests.fuzz.mutations import mutated
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.model import identity
from tests.support.scripted.replica import ScriptedReplica
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import Harness, Result, expected_ids, request, running

_CONTEXT = 300
_MOST_S = 20.0
_NUM_TOKENS = 10
_VICTIM, _NEIGHBOUR = 21, 22
"""Seeds."""
_SETTINGS = {
    "session_stall_s": 0.5, "target_timeout_s": 3.0, "draft_stall_s": 0.5, "ejection_failures": 1000,
    "keepalive_time_s": 600.0, "reconnect_first_s": 0.01, "reconnect_backoff_max_s": 0.02,
}  # fmt: skip
_FULL = {"num_sessions": 9, "max_sessions": 9}
_ROOM = {"num_sessions": 0, "max_sessions": 9}
_TARGET_KINDS = (
    "verdict", "verdict", "verdict", "opened", "progress", "error", "proposal_rejected", "load", "attached",
    "GetReplicaInfoResponse",
)  # fmt: skip
_DRAFT_KINDS = ("proposal", "proposal", "opened", "error", "load", "attached", "GetReplicaInfoResponse")
_ALLOWED = frozenset({"REQUEST_QUARANTINED", "NON_FINITE_LOGITS"})


def victim(**fields: Any) -> api.GenerateRequest:
    """What the liar lies about."""
    return request(max_tokens=_NUM_TOKENS, seed=_VICTIM, logprobs=1, prompt_logprobs=1, **fields)


class Liar:
    """One replica that lies about one session once in each case."""

    def __init__(self, harness: Harness, replica: ScriptedReplica, mouth: Mouth, honest: ScriptedTarget) -> None:
        self._harness = harness
        self._replica = replica
        self._mouth = mouth
        self._honest = honest
        self.is_target = isinstance(replica, ScriptedTarget)
        self._was_asked_who = False
        self._deciding = replica if isinstance(replica, ScriptedTarget) else honest
        """Who decides the tokens; it waits after some until the liar has said what it is to say."""

    async def try_one(self, case: Case) -> None:
        """A request is lied about while another one, at the same replicas, is not."""
        rng = case.rng
        kind = rng.choice(_TARGET_KINDS if self.is_target else _DRAFT_KINDS)
        after = rng.choice([0, 0, 1, 2]) if kind in ("verdict", "proposal") else 0

        def change(message: Message) -> bytes:
            mutation = mutated(rng, message)
            case.what.append(f"{kind} {after}: {mutation.what}")
            return case.sent(mutation.apply())

        before = self._mouth.num_lies
        self._mouth.lie = once(kind, after, change, self._is_victim)
        self._deciding.set_limit(_NUM_TOKENS // 2)
        try:
            neighbour = asyncio.create_task(self._ask(request(max_tokens=_NUM_TOKENS, seed=_NEIGHBOUR)))
            asked = asyncio.create_task(self._ask(victim()))
            await self._provoke(kind, asked)
            result, reason = await within(_MOST_S, asked, "the answer that is lied about")
            beside, failed = await within(_MOST_S, neighbour, "the answer beside")
        finally:
            self._mouth.lie = None
            self._deciding.set_limit(None)
        case.what.append("" if self._mouth.num_lies > before else "(not said)")
        require(not failed, f"the request beside failed: {failed}")
        require(beside.ids() == self._expected(_NEIGHBOUR), f"the request beside got {beside.ids()}")
        self._check(kind, result, reason)

    async def is_whole(self) -> None:
        """The replica is in use again, and a good request is answered rightly."""
        link = next(link for link in self._harness.service.fleet.links if link.address == self._replica.address)
        num_streams = link.num_streams
        if self._was_asked_who:
            self._replica.break_streams()  # it says the truth now
        async with asyncio.timeout(_MOST_S):
            while not link.is_ready or (self._was_asked_who and link.num_streams == num_streams):
                await self._harness.service.fleet.wait_changed()
        self._was_asked_who = False
        self.direct()
        result, reason = await within(_MOST_S, self._ask(request(max_tokens=_NUM_TOKENS, seed=5)), "a good request")
        require(not reason and result.ids() == self._expected(5), f"a good request: {reason} {result.ids()}")

    def direct(self) -> None:
        """Have new sessions go to the liar."""
        if isinstance(self._replica, ScriptedTarget):
            self._honest.tell_load(**_FULL)
            self._replica.tell_load(**_ROOM)

    def _expected(self, seed: int) -> list[int]:
        return expected_ids(self._honest, _NUM_TOKENS, seed=seed)

    def _is_victim(self, session_id: str) -> bool:
        session = self._replica.sessions.get(session_id)
        return session is not None and session.body.sampling.seed == _VICTIM

    async def _provoke(self, kind: str, asked: asyncio.Task[Any]) -> None:
        """Make the replica say what it says rarely, of what was `asked` if that is still open by then."""
        replica = self._replica
        if kind in ("attached", "GetReplicaInfoResponse"):
            self._was_asked_who = True
            replica.break_streams()
        elif kind == "load":
            await asyncio.sleep(0)
            if isinstance(replica, ScriptedTarget):
                replica.tell_load(num_running=1, num_waiting=2, kv_blocks_used=3, draft_credit=4, **_ROOM)
        elif kind in ("progress", "error", "proposal_rejected"):
            body = {"progress": _PROGRESS, "error": _ERROR, "proposal_rejected": _REJECTED}[kind]
            seen = asyncio.create_task(replica.until(lambda: any(map(self._is_victim, replica.sessions)), _MOST_S))
            await asyncio.wait({seen, asked}, return_when=asyncio.FIRST_COMPLETED)
            seen.cancel()
            for session in [s for s in replica.sessions.values() if s.body.sampling.seed == _VICTIM]:
                replica.emit(session, **{kind: body})
        self._deciding.set_limit(None)

    async def _ask(self, body: api.GenerateRequest) -> tuple[Result, str]:
        """What came of a request: its tokens, and the reason of its error."""
        result = Result()
        call = self._harness.stub.Generate(body)
        try:
            while (chunk := await call.read()) is not grpc.aio.EOF:
                result.add(chunk)
        except grpc.aio.AioRpcError as error:
            return result, check_status(error.code(), error.trailing_metadata() or (), _ALLOWED)  # type: ignore[arg-type]
        require(result.finished is not None and 0 in result.ended, "a stream without an end")
        return result, ""

    def _check(self, kind: str, result: Result, reason: str) -> None:
        """What a client gets is of the vocabulary, and no more than it asked for; only verdicts can change it."""
        ids = result.ids()
        require(len(ids) <= _NUM_TOKENS, f"{len(ids)} tokens, {_NUM_TOKENS} were asked for")
        require(all(token < self._honest.identity.vocab_size for token in ids), f"tokens of no vocabulary: {ids}")
        expected = self._expected(_VICTIM)
        if kind != "verdict":
            require(ids == expected[: len(ids)], f"the request got {ids}, {expected} is right")
            require(bool(reason) or ids == expected, f"the request ended after {ids}")


def _status(code: int, reason: str) -> status_pb2.Status:
    status = status_pb2.Status(code=code, message="something")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain="specdec", metadata={"a": "b"}))
    violation = error_details_pb2.BadRequest.FieldViolation(field="proposal", description="bad")
    status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    status.details.add().Pack(error_details_pb2.RetryInfo())
    return status


_PROGRESS = pb.SessionProgress(state=pb.SessionProgress.STATE_RUNNING, num_computed_tokens=3)
_ERROR = pb.SessionError(status=_status(code_pb2.RESOURCE_EXHAUSTED, "TOO_MANY_SESSIONS"), expected_position=3)
_REJECTED = pb.ProposalRejected(status=_status(code_pb2.INVALID_ARGUMENT, "INVALID_FIELD"), expected_position=3)


@asynccontextmanager
async def target_opened(complaints: Complaints) -> AsyncIterator[Run]:
    """A target that lies, one that does not, and a draft."""
    served = identity(max_model_len=_CONTEXT)
    honest, liar, draft = ScriptedTarget(served), LyingTarget(served), ScriptedDraft()
    async with running([honest, liar], [draft], **_SETTINGS) as harness:
        await harness.all_ready()
        yield runs(Liar(harness, liar, liar.mouth, honest))


@asynccontextmanager
async def draft_opened(complaints: Complaints) -> AsyncIterator[Run]:
    """A draft that lies, and a target that does not."""
    honest, liar = ScriptedTarget(identity(max_model_len=_CONTEXT)), LyingDraft(identity("lying-draft"))
    async with running([honest], [liar], **_SETTINGS) as harness:
        await harness.all_ready()
        yield runs(Liar(harness, liar, liar.mouth, honest))


def runs(liar: Liar) -> Callable[[Case], Any]:
    """A case: all is well, a lie, all is well."""

    async def run(case: Case) -> None:
        liar.direct()
        await liar.try_one(case)
        await liar.is_whole()

    return run


TARGET, DRAFT = Link("target-coordinator", target_opened), Link("draft-coordinator", draft_opened)
