"""From a Generate request to a plan of its decoding: all its fields are checked here, before it takes a place."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from specdec.coordinator.intake.line import Claim
from specdec.coordinator.intake.prompt import PromptReader, Texts
from specdec.coordinator.intake.resume import (
    HeldChoice,
    check_params,
    check_resume_token,
    check_template,
    encode_params,
    held_choices,
    make_resume_token,
    planned_terms,
    prompt_logprobs_start,
)
from specdec.coordinator.intake.terms import Terms, check_prompt_logprobs, settle_terms
from specdec.coordinator.intake.text_limits import TokenizingTurns
from specdec.coordinator.intake.validation import (
    CheckedSampling,
    CheckedSpeculation,
    Limits,
    check_cache_salt,
    check_request_id,
    check_sampling,
    check_speculation,
)
from specdec.coordinator.journal import Journal
from specdec.coordinator.replicas.compatibility import ServedModel
from specdec.coordinator.replicas.fleet import Fleet
from specdec.coordinator.sessions.client_stream import ClientStream
from specdec.coordinator.sessions.request_trace import RequestTrace
from specdec.coordinator.sessions.session import Request
from specdec.coordinator.tasks import in_turns, let_others_run
from specdec.coordinator.tenants.quotas import Allowance
from specdec.store.interface import RequestKey
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest

_EXPECTED_OUTPUT_TOKENS = 256
"""Tokens that an unfinished choice is assumed to generate, if it may generate more; corrected when it ends."""
_UID_DIGITS = 16
"""Hexadecimal digits, some 60 random bits, of an id that is unique among a coordinator's requests."""


@dataclass(frozen=True, slots=True)
class RequestCaller:
    """The caller of a request: tenant, deadline, allowance."""

    tenant: str
    deadline_s: float | None
    """Monotonic time."""
    allowance: Allowance = field(default_factory=Allowance)
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    """W3C Trace Context, if the caller sent one."""
    arrived_s: float = field(default_factory=time.monotonic)
    """Monotonic time."""
    held: ExitStack = field(default_factory=ExitStack)
    """Resources held until the call's end has reached the caller, which may be slow to read."""

    def salted(self, cache_salt: str) -> bytes:
        """The salt of prefix caching: it keeps tenants apart, and within a tenant the requests with different salts.

        Tenants' names contain no NUL, so no two tenants share a salt.
        """
        return self.tenant.encode() + (b"\0" + cache_salt.encode() if cache_salt else b"")


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """A checked request with everything needed to run it."""

    request: Request
    served: ServedModel
    prompt: list[int]
    """Token ids, truncated if the client asked for it."""
    sampling: CheckedSampling
    speculation: CheckedSpeculation
    prediction: list[int]
    """Token ids that the client expects as output."""
    is_thinking: bool | None
    """Whether the rendered prompt ends within a think section; None: unknown."""
    max_tokens: int
    """Output limit of each choice."""
    max_model_len: int
    seed: int
    resume_token: bytes
    """Proof with which a client may resume the request."""
    is_resume: bool
    journal_params: bytes
    """Parameters that a resuming request must repeat."""
    held: list[HeldChoice]
    """Output that is known already, one entry per choice."""
    prompt_logprobs_start: int
    """First position whose prompt log-probabilities the client lacks."""
    prompt_logprobs_in_parts: bool
    """The client takes them in several chunks."""
    allowance: Allowance
    """The caller's."""

    def claim(self) -> Claim:
        """The request's claim on the admission queue. Work is in tokens; choices share their prompt."""
        return Claim(
            tenant=self.request.key.tenant,
            priority=self.request.priority,
            work=self.num_tokens(self.sampling.n * min(self.max_tokens, _EXPECTED_OUTPUT_TOKENS)),
            num_places=self.sampling.n,
            is_divisible=True,
            weight=self.allowance.weight,
            deadline_s=self.request.deadline_s,
        )

    def num_tokens(self, num_output_tokens: int) -> float:
        """Work of the request, in tokens."""
        return float(len(self.prompt) + num_output_tokens)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request's checked fields, before its texts are tokenized."""

    served: ServedModel
    seed: int
    resume_token: bytes
    max_model_len: int
    limits: Limits
    """The model's, narrowed by the caller's allowance."""
    sampling: CheckedSampling
    speculation: CheckedSpeculation


class Planner:
    """Checks requests against the model that is served, the caller's limits and, to resume, the journal.

    It works in stages, each in one file: fields (validation.py), texts (prompt.py), lengths and sizes (terms.py), and
    known output (resume.py).
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        journal: Journal,
        limits_of: Callable[[pb.ModelIdentity], Limits],
        default_mode: pb.VerifyMode.ValueType,
        default_method: pb.RejectionSampleMethod.ValueType,
        resume_secret: bytes,
        turns: TokenizingTurns,
        max_message_bytes: int,
    ) -> None:
        """Plan nothing yet.

        Args:
            fleet: knows the served model.
            journal: knows the output of resumed requests.
            limits_of: returns what clients may ask of a model.
            default_mode: verification mode of requests that name none.
            default_method: rejection mode's method for chains, for requests that name none.
            resume_secret: the key of resume tokens.
            turns: where long texts are tokenized.
            max_message_bytes: size limit of clients' messages.
        """
        self._max_message_bytes = max_message_bytes
        self._turns = turns
        self._fleet = fleet
        self._journal = journal
        self._limits_of = limits_of
        self._default_mode = default_mode
        self._default_method = default_method
        self._resume_secret = resume_secret

    def key(self, body: api.GenerateRequest, caller: RequestCaller) -> RequestKey:
        """Tenant and request id: the client's, or a random one. Raises InvalidRequest."""
        check_request_id(body.request_id)
        check_cache_salt(body.cache_salt)
        return RequestKey(caller.tenant, body.request_id or uuid.uuid4().hex)

    async def plan(
        self, body: api.GenerateRequest, key: RequestKey, caller: RequestCaller, trace: RequestTrace
    ) -> RequestPlan:
        """Return what to decode. `trace` becomes the request's and records its parameters.

        Raises:
            SpecdecError: the request is invalid, or no model is served that it could use.
        """
        asked = self._read(body, key, caller)
        sampling = asked.sampling
        with trace.phase("tokenize"):
            turns, weight = self._turns, caller.allowance.weight
            reader = PromptReader(asked.served.tokenizer, asked.limits, turns, caller.tenant, weight)
            texts = await reader.tokenize(body, sampling)
        await let_others_run(len(texts.prompt))
        terms = settle_terms(
            body,
            sampling,
            texts,
            asked.limits,
            most_open_bytes=self._fleet.most_open_bytes(),
            max_message_bytes=self._max_message_bytes,
        )
        trace.accepted(
            body,
            request_id=key.request_id,
            model=asked.served.identity.name,
            sampling=sampling.token_sampling,
            num_choices=sampling.n,
            max_tokens=terms.max_tokens,
            stop=sampling.stop,
        )
        await let_others_run(len(texts.prompt))
        journal_params = encode_params(body, texts.prompt, asked.seed)
        await let_others_run(len(texts.prompt))
        prompt_start, held = await self._resume(body, key, asked, texts, terms, journal_params)
        return RequestPlan(
            request=_request(body, key, caller, asked, texts, terms, trace),
            served=asked.served,
            prompt=texts.prompt,
            sampling=sampling,
            speculation=asked.speculation,
            prediction=texts.prediction,
            is_thinking=texts.is_thinking,
            max_tokens=terms.max_tokens,
            max_model_len=asked.max_model_len,
            seed=asked.seed,
            resume_token=asked.resume_token,
            is_resume=body.HasField("resume"),
            journal_params=journal_params,
            held=held,
            prompt_logprobs_start=prompt_start,
            prompt_logprobs_in_parts=body.prompt_logprobs_in_parts,
            allowance=caller.allowance,
        )

    def _read(self, body: api.GenerateRequest, key: RequestKey, caller: RequestCaller) -> _Asked:
        """Check the fields. A resumed request keeps the terms that its resume token proves."""
        served = self._fleet.require_served(body.model)
        seed = _seed(body)
        token = body.resume.resume_token if body.HasField("resume") else None
        planned = None if token is None else planned_terms(token)
        if planned is not None:
            served = served.with_terms(planned.max_model_len, planned.numerics_id)
        expected_token = make_resume_token(self._resume_secret, *key, seed, served.identity)
        if token is not None:
            check_resume_token(token, expected_token)
            check_template(body.resume, served.tokenizer.template_digest)
            if body.resume.HasField("model"):
                served = served.as_begun(body.resume.model)
            self._fleet.check_numerics(served.identity)
        model_limits = self._limits_of(served.identity)
        limits = model_limits.within(caller.allowance)
        return _Asked(
            served=served,
            seed=seed,
            resume_token=expected_token,
            max_model_len=model_limits.max_model_len,
            limits=limits,
            sampling=check_sampling(body.sampling, limits),
            speculation=check_speculation(body.speculation, self._default_mode, limits, self._default_method),
        )

    async def _resume(
        self, body: api.GenerateRequest, key: RequestKey, asked: _Asked, texts: Texts, terms: Terms, params: bytes
    ) -> tuple[int, list[HeldChoice]]:
        """Position before which the prompt's log-probabilities need no computing, and each choice's known output."""
        sampling = asked.sampling
        start = prompt_logprobs_start(body, len(texts.prompt))
        check_prompt_logprobs(body, len(texts.prompt), terms)
        if not body.HasField("resume"):
            return start, [HeldChoice() for _ in range(sampling.n)]
        record = await self._journal.load(key)
        if record is not None:
            check_params(record.params, params, str(body.WhichOneof("input")))
        lacks_prompt = sampling.prompt_logprobs is not None and start < len(texts.prompt)
        with_logprobs = sampling.token_sampling.HasField("num_logprobs")
        merging = held_choices(
            body.resume,
            sampling.n,
            record,
            asked.served.identity.vocab_size,
            max_tokens=terms.max_tokens,
            computed_again=range(sampling.n) if with_logprobs else range(lacks_prompt),
        )
        return start, await in_turns(merging)


def _request(
    body: api.GenerateRequest,
    key: RequestKey,
    caller: RequestCaller,
    asked: _Asked,
    texts: Texts,
    terms: Terms,
    trace: RequestTrace,
) -> Request:
    return Request(
        key=key,
        uid=uuid.uuid4().hex[:_UID_DIGITS],
        stream=ClientStream(),
        arrived_s=caller.arrived_s,
        model=asked.served.identity,
        with_steps=body.with_steps,
        is_constrained=body.sampling.HasField("constraint"),
        priority=body.priority,
        cache_salt=caller.salted(body.cache_salt),
        is_salted=bool(body.cache_salt),
        deadline_s=caller.deadline_s,
        trace=trace,
        num_context_tokens=len(texts.prompt) + terms.max_tokens,
        num_open_bytes=terms.num_open_bytes,
        num_prompt_logprobs_bytes=terms.num_prompt_logprobs_bytes,
    )


def _seed(body: api.GenerateRequest) -> int:
    """The request's seed, or a random one; a resumed request must name its id and its seed."""
    has_seed = body.sampling.HasField("seed")
    if body.HasField("resume") and not body.request_id:
        raise InvalidRequest("request_id", "is missing: a resumed request is sent with the id of its first chunk")
    if body.HasField("resume") and not has_seed:
        raise InvalidRequest("sampling.seed", "is missing: a resumed request is sent with the seed of its first chunk")
    return body.sampling.seed if has_seed else secrets.randbits(64)
