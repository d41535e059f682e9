"""A target that decodes with the made-up model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2
from tokenizers import Tokenizer

from specdec.v1 import common_pb2 as pb
from specdec.v1 import target_pb2, target_pb2_grpc
from tests.support.scripted.model import EOS, identity, make_tokenizer, next_token, prompt_positions
from tests.support.scripted.replica import ScriptedReplica, ScriptedSession, Stream


class ScriptedTarget(ScriptedReplica):
    """Decodes every session as far as its credit and `limit` allow, and verifies chains."""

    def __init__(self, served: pb.ModelIdentity | None = None, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(served or identity())
        self.tokenizer_json = (tokenizer or make_tokenizer()).to_str().encode()
        self.tokenizer_config = "{}"
        self.limit: int | None = None
        """Output tokens of a session, at most; None: no limit."""
        self.tokens_per_verdict = 1
        self.knows_parts = True
        """Whether it sends the prompt's log-probabilities in parts; older targets send them with the first verdict."""
        self.positions_per_part = 4
        self.prompt_limit: int | None = None
        """Position of the prompt below which log-probabilities are computed; None: no limit."""
        self.prompt_starts: list[int] = []
        """First position of the log-probabilities that each opening asks for."""
        self.needs_proposals = False
        """Whether a session steps after its first token only when it has a proposal."""
        self.suspends: Callable[[ScriptedSession], bool] = lambda session: False
        """Whether a verdict suspends the draft, by the session after the verdict."""
        self.num_relayed = 0
        self.end_after: dict[int, int] = {}
        """Number of the output token that is EOS, by choice index."""
        self.faults_on: Callable[[ScriptedSession], bool] = lambda session: False
        """Whether a session fails with a fault of its own when it is stepped."""
        self.step_s: float | None = None
        """Seconds between two steps, whose results go in one message, as a real target's do. None: sessions are decoded
        as fast as this process can, each token in a message of its own: with many sessions more than a coordinator
        takes, and what one session gets waits behind the credit of all others."""
        self._results: dict[Stream, list[target_pb2.TargetResult]] | None = None
        """Results of the step under way; None: they go at once."""
        self._wake = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await super().start()
        self._runner = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._runner is not None:
            self._runner.cancel()
        await super().stop()

    def register(self, server: grpc.aio.Server) -> None:
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, server)  # type: ignore[arg-type]

    def tell_progress(self, state: pb.SessionProgress.State.ValueType, num_computed: int) -> None:
        """Send the same progress for all sessions."""
        for session in self.sessions.values():
            self.emit(session, progress=pb.SessionProgress(state=state, num_computed_tokens=num_computed))

    def tell_load(self, **load: int) -> None:
        """Report a load on all streams."""
        for stream in self.streams:
            stream.send(target_pb2.VerifyResponse(load=pb.LoadReport(**load)))

    def set_limit(self, limit: int | None) -> None:
        self.limit = limit
        self._wake.set()

    def set_needs_proposals(self, needs: bool) -> None:
        self.needs_proposals = needs
        self._wake.set()

    async def Verify(self, requests: Any, context: Any) -> AsyncIterator[target_pb2.VerifyResponse]:
        async for response in self.serve(requests, context, target_pb2.VerifyResponse):
            yield response

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[pb.GetTokenizerResponse]:
        half = len(self.tokenizer_json) // 2
        first, rest = self.tokenizer_json[:half], self.tokenizer_json[half:]
        yield pb.GetTokenizerResponse(tokenizer_json=first, tokenizer_config=self.tokenizer_config)
        yield pb.GetTokenizerResponse(tokenizer_json=rest)

    async def SetDrafters(self, request: target_pb2.SetDraftersRequest, context: Any) -> target_pb2.SetDraftersResponse:
        """Report all named drafters as running."""
        names = request.drafters.split(",")
        for stream in self.streams:
            stream.send(target_pb2.VerifyResponse(load=pb.LoadReport(drafters=pb.DrafterNames(names=names))))
        return target_pb2.SetDraftersResponse(drafters=names)

    async def Link(self, requests: Any, context: Any) -> None:
        """As a target of a release without links."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED)

    def num_output(self, session_id_end: str = "/0") -> int:
        """Number of output tokens of the session whose id has this end."""
        for session in self.sessions.values():
            if session.session_id.endswith(session_id_end):
                return len(session.token_ids) - session.body.num_prompt_tokens
        return 0

    def emit(self, session: ScriptedSession, **body: Any) -> None:
        if session.stream is not None:
            result = target_pb2.TargetResult(session_id=session.session_id, epoch=session.epoch, **body)
            if self._results is None:
                session.stream.send(target_pb2.VerifyResponse(results=[result]))
            else:
                self._results.setdefault(session.stream, []).append(result)

    def on_open(self, session: ScriptedSession) -> None:
        if session.body.HasField("num_prompt_logprobs"):
            self.prompt_starts.append(session.prompt_next)
        self._wake.set()

    def on_entry(self, session: ScriptedSession, kind: str, body: Any) -> None:
        if kind == "credit":
            session.credit = body.position
            session.prompt_credit = max(session.prompt_credit, body.prompt_logprobs_position)
            arrived = body.acknowledged_prompt_logprobs_position
            session.parts = [p for p in session.parts if p.start_position + len(p.positions) > arrived]
            session.sent = [v for v in session.sent if v.start_position + len(v.token_ids) > body.acknowledged_position]
        elif kind == "proposal":
            self.num_relayed += 1
            try:
                session.proposals.append(pb.Proposal.FromString(body))
            except Exception:
                info = error_details_pb2.ErrorInfo(reason="INVALID_FIELD", domain="specdec")
                status = status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message="proposal: does not parse")
                status.details.add().Pack(info)
                self.emit(session, proposal_rejected=pb.ProposalRejected(status=status))
        self._wake.set()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            sessions = list(self.sessions.values())
            self._results = None if self.step_s is None else {}
            stepped = [self._step(session) for session in sessions if session.session_id in self.sessions]
            for stream, results in (self._results or {}).items():
                stream.send(target_pb2.VerifyResponse(results=results))
            self._results = None
            await self.notify()
            if any(stepped):
                await asyncio.sleep(self.step_s or 0)
            else:
                await self._wake.wait()

    def _step(self, session: ScriptedSession) -> bool:
        body = session.body
        num_output = len(session.token_ids) - body.num_prompt_tokens
        if session.is_done or session.stream is None or len(session.token_ids) >= session.credit:
            return False
        if self.limit is not None and num_output >= self.limit:
            return False
        if self.dies_of(session):
            self.die(self.step_of(session))
            return False
        if self.faults_on(session):
            info = error_details_pb2.ErrorInfo(reason="SESSION_FAULT", domain="specdec")
            status = status_pb2.Status(code=code_pb2.INTERNAL, message="the session's share of a step failed")
            status.details.add().Pack(info)
            self.fail_session(session.session_id, status)
            return False
        in_parts = self.knows_parts and body.HasField("prompt_logprobs_credit")
        if in_parts and body.HasField("num_prompt_logprobs") and session.prompt_next < body.num_prompt_tokens:
            return self._tell_prompt(session)
        verdict = pb.Verdict(start_position=len(session.token_ids), step_us=100)
        if not session.is_sampled:
            verdict.queue_us, verdict.prefill_us, verdict.num_cached_tokens = 200, 300, 2
            if body.HasField("num_prompt_logprobs") and not in_parts:
                verdict.prompt_logprobs.extend(prompt_positions(body, 1, body.num_prompt_tokens))
        guesses = self._guesses(session)
        if self.needs_proposals and session.is_sampled and not guesses:
            return False
        num_wanted = 1 if not session.is_sampled else max(self.tokens_per_verdict, len(guesses) + 1)
        for index in range(num_wanted):
            token = self._sample(session)
            is_accepted = index < len(guesses) and guesses[index] == token
            self._add(verdict, session, token, self._origin(session, guesses, index, is_accepted))
            if index < len(guesses):
                verdict.verified_by_depth.append(1)
                verdict.num_accepted += is_accepted
            if verdict.finish_reason or (index < len(guesses) and not is_accepted):
                break
        verdict.hit = bool(guesses)
        verdict.suspends_draft = self.suspends(session)
        session.is_sampled = True
        session.sent.append(verdict)
        session.is_done = bool(verdict.finish_reason)
        self.emit(session, verdict=verdict)
        return True

    def set_prompt_limit(self, limit: int | None) -> None:
        self.prompt_limit = limit
        self._wake.set()

    def _tell_prompt(self, session: ScriptedSession) -> bool:
        body, start = session.body, session.prompt_next
        if start >= session.prompt_credit or (self.prompt_limit is not None and start >= self.prompt_limit):
            return False
        stop = min(start + self.positions_per_part, body.num_prompt_tokens)
        if self.prompt_limit is not None:
            stop = min(stop, self.prompt_limit)
        part = pb.PromptLogprobsPart(start_position=start, positions=prompt_positions(body, start, stop))
        session.prompt_next = stop
        session.parts.append(part)
        self.emit(session, prompt_logprobs=part)
        return True

    def _sample(self, session: ScriptedSession) -> int:
        sampling = session.body.sampling
        num_output = len(session.token_ids) - session.body.num_prompt_tokens
        if self.end_after.get(sampling.choice) == num_output + 1:
            return EOS
        return next_token(session.token_ids, sampling.seed, sampling.choice, self.identity.vocab_size)

    def _add(self, verdict: pb.Verdict, session: ScriptedSession, token: int, origin: pb.Origin.ValueType) -> None:
        sampling = session.body.sampling
        session.token_ids.append(token)
        verdict.token_ids.append(token)
        verdict.origins.append(origin)
        if sampling.HasField("num_logprobs"):
            top = [pb.TokenLogprob(token_id=i, logprob=-float(i)) for i in range(sampling.num_logprobs)]
            verdict.logprobs.append(pb.PositionLogprobs(logprob=-0.5, top=top))
        if token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos):
            verdict.finish_reason, verdict.stop_token_id = pb.FINISH_REASON_STOP, token
        elif len(session.token_ids) - session.body.num_prompt_tokens >= sampling.max_tokens:
            verdict.finish_reason = pb.FINISH_REASON_LENGTH

    def _origin(
        self, session: ScriptedSession, guesses: list[int], index: int, is_accepted: bool
    ) -> pb.Origin.ValueType:
        if not session.is_sampled:
            return pb.ORIGIN_PREFILL
        if is_accepted:
            return pb.ORIGIN_DRAFT
        if not guesses:
            return pb.ORIGIN_DECODE
        return pb.ORIGIN_BONUS if index == len(guesses) else pb.ORIGIN_RECOVERED

    def _guesses(self, session: ScriptedSession) -> list[int]:
        guesses: list[int] = []
        position = len(session.token_ids)
        while session.proposals and session.is_sampled:
            proposal = session.proposals.popleft()
            skipped = position - proposal.start_position
            tokens = list(proposal.token_ids)
            if skipped >= 0 and tokens[:skipped] == session.token_ids[proposal.start_position :][: len(tokens)]:
                guesses = tokens[skipped:]
        return guesses
