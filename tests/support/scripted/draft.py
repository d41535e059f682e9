"""A draft that knows the made-up model's tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.rpc import code_pb2, status_pb2

from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2, draft_pb2_grpc
from tests.support.scripted.model import identity, next_token
from tests.support.scripted.replica import ScriptedReplica, ScriptedSession


class ScriptedDraft(ScriptedReplica):
    """Proposes the next `num_ahead` tokens after every commit; `make_proposal` may be replaced by a wrong one."""

    def __init__(self, served: pb.ModelIdentity | None = None, num_ahead: int = 4) -> None:
        super().__init__(served or identity("scripted-draft", weights_digest="d1"))
        self.num_ahead = num_ahead
        self.committed: dict[str, list[int]] = {}
        self.commits: list[pb.Commit] = []
        self.grants: list[pb.LinkGrant] = []
        """Grants of direct links, none of which it uses."""
        self.make_proposal: Callable[[ScriptedSession], bytes | None] = self.good_proposal

    def register(self, server: grpc.aio.Server) -> None:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, server)  # type: ignore[arg-type]

    async def Draft(self, requests: Any, context: Any) -> AsyncIterator[draft_pb2.DraftResponse]:
        async for response in self.serve(requests, context, draft_pb2.DraftResponse):
            yield response

    def good_proposal(self, session: ScriptedSession) -> bytes | None:
        tokens = list(session.token_ids)
        sampling = session.body.sampling
        for _ in range(self.num_ahead):
            tokens.append(next_token(tokens, sampling.seed, sampling.choice, self.identity.vocab_size))
        ahead = tokens[len(session.token_ids) :]
        return pb.Proposal(start_position=len(session.token_ids), token_ids=ahead, draft_us=50).SerializeToString()

    def emit(self, session: ScriptedSession, **body: Any) -> None:
        if session.stream is not None:
            result = draft_pb2.DraftResult(session_id=session.session_id, epoch=session.epoch, **body)
            session.stream.send(draft_pb2.DraftResponse(results=[result]))

    def on_open(self, session: ScriptedSession) -> None:
        self._propose(session)

    def on_entry(self, session: ScriptedSession, kind: str, body: Any) -> None:
        if kind == "link":
            self.grants.append(body)
            return
        if body.start_position != len(session.token_ids):
            status = status_pb2.Status(code=code_pb2.OUT_OF_RANGE, message="a commit is missing")
            self.fail_session(session.session_id, status)
            return
        self.commits.append(body)
        session.token_ids.extend(body.token_ids)
        self.committed[session.session_id] = session.token_ids[session.body.num_prompt_tokens :]
        if not body.suspend:
            self._propose(session)

    def _propose(self, session: ScriptedSession) -> None:
        if self.dies_of(session):
            self.die(self.step_of(session))
            return
        proposal = self.make_proposal(session)
        if proposal is not None:
            self.emit(session, proposal=proposal)
