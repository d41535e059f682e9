"""A target and a draft that speak the wire protocol over real sockets, with a made-up model: the next token
is a hash of the tokens before it, the seed and the choice. What they do wrong, and when, is under a test's
control.
"""

from __future__ import annotations

import asyncio
import zlib
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from specdec.rpc.abort import abort_with
from specdec.rpc.errors import SpecdecError, Unavailable
from specdec.session_keys import session_key
from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

EOS = 1
NUM_SPECIAL = 3
PATIENCE_S = 60.0


def make_tokenizer() -> Tokenizer:
    """A small byte-level BPE; ids 0 to 2 are special, 1 ends a sequence."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(t, special=True) for t in ("<|bos|>", "<|eos|>", "<|pad|>")],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog, été 你好 🙂"] * 4, trainer)
    return tokenizer


def identity(name: str = "scripted", **changes: Any) -> pb.ModelIdentity:
    """What a scripted replica says it serves."""
    fields: dict[str, Any] = {
        "name": name,
        "architecture": "Scripted",
        "weights_digest": "w1",
        "tokenizer_digest": "t1",
        "numerics_id": "n1",
        "row_invariant": True,
        "vocab_size": make_tokenizer().get_vocab_size(),
        "max_model_len": 4096,
        "eos_token_ids": [EOS],
    }
    return pb.ModelIdentity(**{**fields, **changes})


def next_token(token_ids: Iterable[int], seed: int, choice: int, vocab_size: int) -> int:
    """The made-up model; it never ends a sequence by itself."""
    digest = zlib.crc32(array("Q", [*list(token_ids)[-8:], seed % 2**63, choice]).tobytes())
    return NUM_SPECIAL + digest % (vocab_size - NUM_SPECIAL)


def prompt_positions(body: pb.OpenSession, start: int, stop: int) -> list[pb.PositionLogprobs]:
    """The made-up model's log-probabilities of a prompt's tokens from `start` to `stop`."""
    return [
        pb.PositionLogprobs(
            logprob=-float(position),
            top=[pb.TokenLogprob(token_id=i, logprob=-float(i)) for i in range(body.num_prompt_logprobs)],
        )
        for position in range(start, stop)
    ]


@dataclass
class ScriptedSession:
    """A session as a scripted replica holds it."""

    session_id: str
    epoch: int
    body: pb.OpenSession
    token_ids: list[int]
    stream: Stream | None
    credit: int = 0
    proposals: deque[pb.Proposal] = field(default_factory=deque)
    sent: list[pb.Verdict] = field(default_factory=list)
    prompt_next: int = 1
    """The first position of the prompt whose log-probabilities have not been computed."""
    prompt_credit: int = 0
    parts: list[pb.PromptLogprobsPart] = field(default_factory=list)
    """Those that were not acknowledged."""
    is_done: bool = False
    is_sampled: bool = False


class Stream:
    """One coordinator's stream: a queue of responses, and of how it ends."""

    def __init__(self) -> None:
        self.responses: asyncio.Queue[Any] = asyncio.Queue()
        self.owner_id = ""

    def send(self, response: Any) -> None:
        self.responses.put_nowait(response)

    def abort(self, error: SpecdecError | None = None) -> None:
        self.responses.put_nowait(error or Unavailable("the stream broke"))

    def end(self) -> None:
        self.responses.put_nowait(None)


class ScriptedReplica:
    """What targets and drafts share: a server that can be started, stopped and cut off at will."""

    def __init__(self, served: pb.ModelIdentity) -> None:
        self.identity = served
        self.port = 0
        self.sessions: dict[str, ScriptedSession] = {}
        self.streams: list[Stream] = []
        self.opened: list[tuple[str, int, int]] = []
        """Session id, epoch and number of tokens of every opening."""
        self.closed: list[tuple[str, str]] = []
        self.frames: list[Any] = []
        self.refuse: status_pb2.Status | None = None
        self.instance_id = ""
        self.last_end: pb.EngineEnd | None = None
        """How its engine ended last, where it tells whom that was working for and steps apart; None: it is older."""
        self.dies_of: Callable[[ScriptedSession], bool] = lambda session: False
        """The engine dies when it steps such a session; it is there again at once, as another instance."""
        self.num_deaths = 0
        self.max_message_bytes = 0
        """What it says that it takes; 0: nothing, as older replicas."""
        self.attaches: list[pb.Attach] = []
        self.num_asked = 0
        """Calls of GetReplicaInfo."""
        self.changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        # Coordinators ping idle replicas, and ours may be idle for as long as a busy machine lets a test take.
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.http2.max_ping_strikes", 0)])
        self.register(self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        """The process dies: streams break and sessions are forgotten."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None
        self.sessions.clear()
        self.streams.clear()

    def break_streams(self) -> None:
        """The network fails; sessions survive."""
        self.end_streams(Unavailable("the stream broke"))

    def end_streams(self, error: SpecdecError) -> None:
        """The replica ends all streams, with a status; sessions survive."""
        for stream in self.streams:
            stream.abort(error)

    def die(self, step: Iterable[ScriptedSession] = ()) -> None:
        """The engine ends in a step of these, and another one takes its place."""
        self.num_deaths += 1
        error = Unavailable("the engine ended", reason="ENGINE_GONE")
        if self.last_end is not None:
            keys = b"".join(session_key(session.session_id) for session in step)
            self.last_end = pb.EngineEnd(
                instance_id=self.instance_id, reason="ENGINE_GONE", is_told=True, session_keys=keys
            )
            error.attached.append(self.last_end)
        self.instance_id = f"{self.port}-{self.num_deaths}"
        self.sessions.clear()
        self.end_streams(error)

    def step_of(self, session: ScriptedSession) -> list[ScriptedSession]:
        """Those who are stepped together with a session, and it."""
        return [session] if _is_apart(session) else [s for s in self.sessions.values() if not _is_apart(s)]

    async def until(self, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        """Wait for a condition on what this replica has seen."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(condition)

    async def notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def register(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    async def GetReplicaInfo(self, request: Any, context: Any) -> pb.GetReplicaInfoResponse:
        self.num_asked += 1
        await self.notify()
        return pb.GetReplicaInfoResponse(
            identity=self.identity,
            instance_id=self.instance_id,
            max_message_bytes=self.max_message_bytes,
            last_end=self.last_end,
        )

    async def serve(self, requests: AsyncIterator[Any], context: Any, response_type: Any) -> AsyncIterator[Any]:
        stream = Stream()
        self.streams.append(stream)
        reader = asyncio.create_task(self._read(requests, stream, response_type))
        try:
            while not isinstance(response := await stream.responses.get(), SpecdecError | None):
                yield response
            if response is not None:
                await abort_with(context, response)
        finally:
            reader.cancel()
            if stream in self.streams:
                self.streams.remove(stream)
            for session in self.sessions.values():
                if session.stream is stream:
                    session.stream = None

    async def _read(self, requests: AsyncIterator[Any], stream: Stream, response_type: Any) -> None:
        async for request in requests:
            self.frames.append(request)
            if request.HasField("attach"):
                self.attach(request.attach, stream, response_type)
            for entry in request.entries:
                self.handle(entry, stream)
            await self.notify()
        stream.end()

    def attach(self, attach: pb.Attach, stream: Stream, response_type: Any) -> None:
        stream.owner_id = attach.owner_id
        self.attaches.append(attach)
        for former in self.streams:
            if former is not stream and former.owner_id == attach.owner_id:
                former.abort()
        listed = {s.session_id: s for s in attach.sessions}
        for session_id, session in list(self.sessions.items()):
            if session_id not in listed or listed[session_id].epoch != session.epoch:
                del self.sessions[session_id]
        unknown = [session_id for session_id in listed if session_id not in self.sessions]
        attached = pb.Attached(identity=self.identity, unknown_session_ids=unknown, instance_id=self.instance_id)
        stream.send(response_type(attached=attached))
        for session_id, session in self.sessions.items():
            session.stream = stream
            for part in session.parts:
                if part.start_position + len(part.positions) > listed[session_id].prompt_logprobs_position:
                    self.emit(session, prompt_logprobs=part)
            for verdict in session.sent:
                if verdict.start_position + len(verdict.token_ids) > listed[session_id].committed_length:
                    self.emit(session, verdict=verdict)

    def handle(self, entry: Any, stream: Stream) -> None:
        kind = entry.WhichOneof("entry")
        if kind == "open":
            self._open(entry, stream)
            return
        session = self.sessions.get(entry.session_id)
        if session is None or session.epoch != entry.epoch:
            return
        if kind == "close":
            del self.sessions[entry.session_id]
            self.closed.append((entry.session_id, entry.close.reason))
        else:
            self.on_entry(session, kind, getattr(entry, kind))

    def _open(self, entry: Any, stream: Stream) -> None:
        session = ScriptedSession(
            entry.session_id,
            entry.epoch,
            entry.open,
            list(entry.open.token_ids),
            stream,
            entry.open.credit_position,
            prompt_next=max(1, entry.open.prompt_logprobs_start),
            prompt_credit=entry.open.prompt_logprobs_credit,
        )
        self.opened.append((entry.session_id, entry.epoch, len(session.token_ids)))
        if self.refuse is not None:
            self.emit(session, error=pb.SessionError(status=self.refuse))
            return
        self.sessions[entry.session_id] = session
        self.emit(session, opened=pb.SessionOpened(position=len(session.token_ids)))
        self.on_open(session)

    def fail_session(self, session_id: str, status: status_pb2.Status) -> None:
        self.emit(self.sessions.pop(session_id), error=pb.SessionError(status=status))

    def emit(self, session: ScriptedSession, **body: Any) -> None:
        raise NotImplementedError

    def on_open(self, session: ScriptedSession) -> None:
        raise NotImplementedError

    def on_entry(self, session: ScriptedSession, kind: str, body: Any) -> None:
        raise NotImplementedError


class ScriptedTarget(ScriptedReplica):
    """Decodes every session as far as credit and `limit` allow; verifies chains."""

    def __init__(self, served: pb.ModelIdentity | None = None, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(served or identity())
        self.tokenizer_json = (tokenizer or make_tokenizer()).to_str().encode()
        self.tokenizer_config = "{}"
        self.limit: int | None = None
        """No session gets more output tokens than this until it is raised; None: no limit."""
        self.tokens_per_verdict = 1
        self.knows_parts = True
        """Sends the prompt's log-probabilities in parts; older targets send them with the first verdict."""
        self.positions_per_part = 4
        self.prompt_limit: int | None = None
        """Log-probabilities of the prompt are computed below this position until it is raised; None: no limit."""
        self.prompt_starts: list[int] = []
        """From where on each opening wanted them."""
        self.needs_proposals = False
        """After the first token, a session steps only when a proposal is there."""
        self.suspends: Callable[[ScriptedSession], bool] = lambda session: False
        """Whether a verdict suspends the draft, by the session after it."""
        self.num_relayed = 0
        self.end_after: dict[int, int] = {}
        """Choice index: ends with EOS as this output token."""
        self.faults_on: Callable[[ScriptedSession], bool] = lambda session: False
        """Such a session ends with a fault of its own when it is stepped."""
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
        """Tell the same of all sessions."""
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
        """Whatever is named is told of as if it ran."""
        names = request.drafters.split(",")
        for stream in self.streams:
            stream.send(target_pb2.VerifyResponse(load=pb.LoadReport(drafters=pb.DrafterNames(names=names))))
        return target_pb2.SetDraftersResponse(drafters=names)

    def num_output(self, session_id_end: str = "/0") -> int:
        """Output tokens of the session whose id ends so."""
        for session in self.sessions.values():
            if session.session_id.endswith(session_id_end):
                return len(session.token_ids) - session.body.num_prompt_tokens
        return 0

    def emit(self, session: ScriptedSession, **body: Any) -> None:
        if session.stream is not None:
            result = target_pb2.TargetResult(session_id=session.session_id, epoch=session.epoch, **body)
            session.stream.send(target_pb2.VerifyResponse(results=[result]))

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
            stepped = [self._step(session) for session in sessions if session.session_id in self.sessions]
            await self.notify()
            if any(stepped):
                await asyncio.sleep(0)
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


def _is_apart(session: ScriptedSession) -> bool:
    return len(session.token_ids) < session.body.apart_until


class ScriptedDraft(ScriptedReplica):
    """Proposes the next `num_ahead` tokens after every commit, rightly unless told otherwise."""

    def __init__(self, served: pb.ModelIdentity | None = None, num_ahead: int = 4) -> None:
        super().__init__(served or identity("scripted-draft", weights_digest="d1"))
        self.num_ahead = num_ahead
        self.committed: dict[str, list[int]] = {}
        self.commits: list[pb.Commit] = []
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
