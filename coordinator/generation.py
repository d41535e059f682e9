"""One Generate call from its request to its last chunk."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import structlog
from grpc import StatusCode

from specdec.config.drafter_options import DRAFT_MODEL
from specdec.coordinator.decode_loop import DecodeLoop
from specdec.coordinator.finishing import Finisher
from specdec.coordinator.intake.admission import AdmissionQueue, Place
from specdec.coordinator.intake.load_shedding import LoadShedding
from specdec.coordinator.intake.planning import Planner, RequestCaller, RequestPlan
from specdec.coordinator.journal import Journal
from specdec.coordinator.observer import Observer
from specdec.coordinator.opening import Opener
from specdec.coordinator.recovery.replay import replay
from specdec.coordinator.replicas.fleet import Fleet
from specdec.coordinator.sessions.client_stream import prompt_end
from specdec.coordinator.sessions.prompt_logprobs import PromptProgress
from specdec.coordinator.sessions.request_trace import RequestTracer
from specdec.coordinator.sessions.session import Request, Session
from specdec.coordinator.sessions.table import SessionTable
from specdec.coordinator.sessions.target_side import TargetSide
from specdec.coordinator.tasks import in_turns, let_others_run
from specdec.coordinator.tenants.quotas import TenantLease, TenantLimits
from specdec.service.byte_budget import ByteBudget
from specdec.store.interface import RequestHeld, RequestKey, TooManyConcurrent
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import Cancelled, NotReady, Overloaded, RequestExists, SpecdecError, Unavailable

Write = Callable[[api.GenerateResponse], Awaitable[None]]
_FAULTS = (StatusCode.INTERNAL, StatusCode.UNKNOWN, StatusCode.UNAVAILABLE, StatusCode.DATA_LOSS)
"""Codes that the alerts count as the server's errors."""
_SHED_NOTICE = "server busy: this request runs without speculation (output unchanged, slower)"
_log = structlog.get_logger(__name__)


class GenerateCalls:
    """Runs Generate calls: check, admit, replay, open, stream. However a call ends, its resources are freed."""

    def __init__(
        self,
        *,
        owner_id: str,
        fleet: Fleet,
        sessions: SessionTable,
        admission: AdmissionQueue,
        tenant_limits: TenantLimits,
        decode_loop: DecodeLoop,
        finisher: Finisher,
        journal: Journal,
        observer: Observer,
        planner: Planner,
        speculate: bool,
        target_timeout_s: float,
        reader_stall_s: float,
        prompt_bytes: ByteBudget,
        gate: LoadShedding,
        tracer: RequestTracer,
        logs_access: bool = False,
    ) -> None:
        """`logs_access`: log each request that ended, not only those that failed."""
        self._owner_id = owner_id
        self._fleet = fleet
        self._sessions = sessions
        self._admission = admission
        self._tenant_limits = tenant_limits
        self._decode_loop = decode_loop
        self._finisher = finisher
        self._journal = journal
        self._observer = observer
        self._planner = planner
        self._speculate = speculate
        self._opener = Opener(fleet, decode_loop, finisher, target_timeout_s)
        self._reader_stall_s = reader_stall_s
        self._prompt_bytes = prompt_bytes
        self._gate = gate
        self._tracer = tracer
        self._logs_access = logs_access
        self.is_draining = False
        """New requests are refused."""

    async def generate(self, body: api.GenerateRequest, caller: RequestCaller, write: Write) -> None:
        """Serve a call.

        Raises:
            SpecdecError: the request is bad, cannot be admitted, or failed on the way.
        """
        code, reason, message = StatusCode.INTERNAL, "INTERNAL", "see internal_error"
        trace = self._tracer.begin(body, caller.tenant, caller.trace_headers)
        # Fields of every log event of the call's task, which ends with the call.
        structlog.contextvars.bind_contextvars(**trace.log_fields)
        plan: RequestPlan | None = None
        try:
            self._check_draining()
            key = self._planner.key(body, caller)
            # A tenant's shares are taken before its request costs anything.
            caller.held.enter_context(self._prompt_bytes.hold(caller.tenant, body.ByteSize()))
            with self._tenant_limits.lease(*key, caller.allowance, is_resume=body.HasField("resume")) as lease:
                plan = await self._planner.plan(body, key, caller, trace)
                # Each choice has the prompt's tokens as a list of its own.
                num_more = (plan.sampling.n - 1) * len(plan.prompt)
                caller.held.enter_context(self._prompt_bytes.hold(caller.tenant, num_more))
                self._check_draining()  # nobody would wait for it any more
                await self._run(plan, lease, write)
            code, reason, message = StatusCode.OK, "", ""
        except SpecdecError as error:
            code, reason, message = error.code, error.reason, error.message
            raise
        except asyncio.CancelledError:
            code, reason, message = StatusCode.CANCELLED, "", ""
            raise
        finally:
            request = None if plan is None else plan.request
            if request is not None:
                self._finisher.drop(request, "cancelled" if code is StatusCode.CANCELLED else "failed")
            has_started = request is not None and bool(request.sessions)
            duration_s = time.monotonic() - caller.arrived_s
            self._observer.request_ended(code.name, duration_s if has_started else None)
            result = None if request is None else request.result()
            trace.end(code, reason, result)
            # Metrics count clients' errors and overload: logged, they would fill the log when it matters.
            log = _log.warning if code in _FAULTS else _log.info if self._logs_access else _log.debug
            lengths = {} if result is None else {
                "prompt_tokens": result.num_prompt_tokens,
                "cached_tokens": result.num_cached_tokens,
                "output_tokens": result.num_output_tokens,
            }  # fmt: skip
            log(
                "request_failed" if code in _FAULTS else "request_ended",
                request_id=body.request_id if request is None else request.key.request_id,
                tenant=caller.tenant,
                code=code.name,
                reason=reason,
                error=message,
                duration_s=round(duration_s, 3),
                **lengths,
            )
            if request is not None:
                await self._journal.end(request)

    async def abort(self, tenant: str, request_id: str) -> bool:
        """End a running or waiting request, at any coordinator that shares the store; False if there is none."""
        key = RequestKey(tenant, request_id)
        request = self._sessions.find_request(key)
        if request is None:
            return await self._journal.abort(key)
        self._finisher.abort(request)
        return True

    async def _run(self, plan: RequestPlan, lease: TenantLease, write: Write) -> None:
        request = plan.request
        self._register(request, plan.is_resume)
        structlog.contextvars.bind_contextvars(request_id=request.key.request_id)
        try:
            await lease.take_prompt(len(plan.prompt))
            async with self._journalled(plan), self._admitted(plan) as place:
                if place is None or request.is_aborted:
                    await self._write_aborted(plan, write)
                    return
                lease.begin()
                try:
                    unfinished = await self._start(plan)
                    async with self._opener.opened(request, unfinished, place):
                        await self._stream(plan, write, lease)
                except Unavailable as error:
                    error.attached.append(_resume_info(plan))
                    raise
        finally:
            self._sessions.remove_request(request)

    def _check_draining(self) -> None:
        if self.is_draining:
            raise NotReady("the coordinator is shutting down", reason="DRAINING")

    def _register(self, request: Request, is_resume: bool) -> None:
        live = self._sessions.find_request(request.key)
        if live is not None:
            if not is_resume:
                raise RequestExists(f"a request with request_id {request.key.request_id!r} is running")
            self._finisher.take_over(live)
        self._sessions.add_request(request)

    @asynccontextmanager
    async def _journalled(self, plan: RequestPlan) -> AsyncIterator[None]:
        """Claim the request for this coordinator in the shared journal; `run` ends the claim."""
        request, most = plan.request, plan.allowance.max_concurrent_requests
        try:
            await self._journal.begin(
                request,
                seed=plan.seed,
                params=plan.journal_params,
                num_choices=plan.sampling.n,
                max_concurrent=most,
                take_over=plan.is_resume,
            )
        except RequestHeld:
            raise RequestExists(f"a request with request_id {request.key.request_id!r} is running") from None
        except TooManyConcurrent as error:
            raise self._tenant_limits.refusal(error.num_running, most) from None
        if request.stream.is_closed:  # taken over meanwhile: raises why
            await request.stream.take()
        yield

    @asynccontextmanager
    async def _admitted(self, plan: RequestPlan) -> AsyncIterator[Place | None]:
        """The request's places; None: it was aborted before."""
        request = plan.request
        if request.is_aborted:
            yield None
            return
        metrics = self._observer.metrics
        started_s = time.monotonic()
        request.waiting = admission = asyncio.create_task(self._admission.acquire(plan.claim()))
        place: Place | None = None
        try:
            with request.trace.phase("admission"):
                place = await admission
        except Overloaded as error:
            metrics.admission_rejects.labels(error.reason.lower()).inc()
            raise
        except asyncio.CancelledError:
            if admission.done() and not admission.cancelled() and admission.exception() is None:
                admission.result().release(0.0)  # the place came in the same turn of the event loop
            if request.stream.is_closed:  # taken over while waiting: raises why
                await request.stream.take()
            if not request.is_aborted:
                raise
        finally:
            request.waiting = None
        metrics.queue_seconds.observe(time.monotonic() - started_s)
        try:
            yield place
        finally:
            if place is not None:
                place.release(plan.num_tokens(sum(session.num_output_tokens for session in request.sessions)))

    async def _start(self, plan: RequestPlan) -> list[Session]:
        """Send the first chunk and the replayed output; returns the unfinished sessions."""
        request, admitted_s = plan.request, time.monotonic()
        self._observer.metrics.prompt_tokens.inc(len(plan.prompt))
        is_plain = self._sheds_speculation(plan)
        request.stream.push(self._started(plan, [_SHED_NOTICE] if is_plain else []))
        request.start(await self._sessions_of(plan))
        if request.is_aborted:  # meanwhile
            self._finisher.abort(request)
        elif request.stream.is_closed:  # taken over
            self._finisher.drop(request, "failed")
        if is_plain:
            for session in request.sessions:
                session.speculate = False
        unfinished = []
        for session, held in zip(request.sessions, plan.held, strict=True):
            session.tally.admission_s = admitted_s - request.arrived_s
            if not await in_turns(replay(self._finisher, session, held, plan.max_model_len)):
                unfinished.append(session)
            self._journal.append(session, held.origins[: session.num_output_tokens])
        return [session for session in unfinished if session.finish is None]

    async def _stream(self, plan: RequestPlan, write: Write, lease: TenantLease | None = None) -> None:
        request = plan.request
        if request.is_constrained:
            # The target compiles the constraint; an error before the first chunk becomes the call's status.
            await request.stream.wait_for_more()
        while (chunk := await request.stream.take()) is not None:
            try:
                async with asyncio.timeout(self._reader_stall_s):
                    await write(chunk)
            except TimeoutError:
                raise self._stalled(plan) from None
            request.trace.wrote(chunk)
            if chunk.HasField("delta") and (num_tokens := len(chunk.delta.tokens)):
                if lease is not None:
                    lease.charge(num_tokens)
                self._decode_loop.on_written(request.sessions[chunk.delta.index], num_tokens)
            elif chunk.HasField("prompt_logprobs"):
                self._decode_loop.on_prompt_written(request.sessions[0], prompt_end(chunk.prompt_logprobs))

    def _stalled(self, plan: RequestPlan) -> Cancelled:
        self._observer.metrics.readers_stalled.inc()
        error = Cancelled(
            f"the client read nothing for {self._reader_stall_s:g} s (reader_stall_s) while output waited for it",
            reason="READER_STALLED",
        )
        error.attached.append(_resume_info(plan))
        return error

    async def _sessions_of(self, plan: RequestPlan) -> list[Session]:
        """A session for each choice, which has a copy of the prompt: between those of a long one other tasks run."""
        sessions = list[Session]()
        for choice in range(plan.sampling.n):
            sessions.append(self._session(plan, choice))
            await let_others_run(len(plan.prompt))
        return sessions

    def _session(self, plan: RequestPlan, choice: int) -> Session:
        request, sampling, served = plan.request, plan.sampling, plan.served
        token_sampling = sampling.for_choice(choice, plan.seed, plan.max_tokens)
        return Session(
            session_id=f"{self._owner_id}/{request.uid}/{choice}",
            choice=choice,
            request=request,
            token_ids=array("I", plan.prompt),
            num_prompt_tokens=len(plan.prompt),
            num_written=len(plan.prompt),
            sampling=token_sampling,
            verify_mode=plan.speculation.verify_mode,
            rejection_method=plan.speculation.rejection_method,
            speculate=plan.speculation.enabled and self._speculate,
            output=sampling.output(served.tokenizer.detokenizers, plan.prompt),
            detokenizers=served.tokenizer.detokenizers,
            max_draft_tokens=plan.speculation.max_draft_tokens,
            time_per_token_us=plan.speculation.time_per_token_us,
            drafters=plan.speculation.drafters,
            prediction=plan.prediction if plan.speculation.enabled else (),
            may_have_draft=not plan.speculation.drafters or DRAFT_MODEL in plan.speculation.drafters,
            target=TargetSide(prompt=_prompt_progress(plan) if choice == 0 else None),
        )

    def _sheds_speculation(self, plan: RequestPlan) -> bool:
        # In rejection mode the proposals decide the tokens of a seed; load must not change them.
        is_exact = plan.speculation.verify_mode == pb.VERIFY_MODE_COUPLED
        if not (is_exact and self._speculate and plan.speculation.enabled and self._gate.is_shedding):
            return False
        self._observer.metrics.speculation_shed.inc()
        return True

    def _started(self, plan: RequestPlan, notices: Sequence[str] = ()) -> api.GenerateResponse:
        started = api.GenerateStarted(
            request_id=plan.request.key.request_id,
            seed=plan.seed,
            model=plan.served.identity,
            resume_token=plan.resume_token,
            num_prompt_tokens=len(plan.prompt),
            notices=[*self._fleet.notices(), *notices],
            is_constrained=plan.request.is_constrained,
            is_salted=plan.request.is_salted,
            is_thinking=plan.is_thinking,
            chat_template_digest=plan.served.tokenizer.template_digest,
        )
        return api.GenerateResponse(started=started)

    async def _write_aborted(self, plan: RequestPlan, write: Write) -> None:
        """A request aborted while it waits gets its first and last chunks, and nothing between."""
        request = plan.request
        request.stream.push(self._started(plan))
        request.start(await self._sessions_of(plan))
        self._finisher.abort(request)
        await self._stream(plan, write)


def _prompt_progress(plan: RequestPlan) -> PromptProgress | None:
    """The prompt's log-probabilities that the client wants and lacks; None if there are none."""
    num_top, start, end = plan.sampling.prompt_logprobs, plan.prompt_logprobs_start, len(plan.prompt)
    if num_top is None or start >= end:
        return None
    return PromptProgress(num_top, end, start, is_joined=not plan.prompt_logprobs_in_parts)


def _resume_info(plan: RequestPlan) -> api.ResumeInfo:
    return api.ResumeInfo(request_id=plan.request.key.request_id, seed=plan.seed, resume_token=plan.resume_token)
