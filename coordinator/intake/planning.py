"""From a Generate request to what is to be decoded: everything in it is checked here, before it takes a place."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from coordinator.intake.prompt import PromptReader
from coordinator.intake.resume import (
    HeldChoice,
    check_params,
    check_resume_token,
    encode_params,
    held_choices,
    make_resume_token,
)
from coordinator.intake.validation import (
    CheckedSampling,
    CheckedSpeculation,
    Limits,
    check_request_id,
    check_sampling,
    check_speculation,
    resolve_max_tokens,
)
from coordinator.journal import Journal
from coordinator.replicas.fleet import Fleet, ServedModel
from coordinator.sessions.session import Request
from coordinator.tenants.quotas import Allowance
from specdec.rpc.errors import InvalidRequest, ModelNotFound
from specdec.store.interface import RequestKey
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, and how much time there is."""

    tenant: str
    deadline_s: float | None
    """On the monotonic clock."""
    allowance: Allowance = field(default_factory=Allowance)
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    """W3C Trace Context, if the caller sent one."""

    @property
    def cache_salt(self) -> bytes:
        """Keeps tenants' prefixes apart."""
        return self.tenant.encode()


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked request."""

    served: ServedModel
    prompt: list[int]
    sampling: CheckedSampling
    speculation: CheckedSpeculation
    max_tokens: int
    max_model_len: int
    seed: int
    resume_token: bytes
    is_resume: bool
    journal_params: bytes
    held: list[HeldChoice]


class Planner:
    """Checks requests against the model that is served, the caller's limits and, to resume, the journal."""

    def __init__(
        self,
        fleet: Fleet,
        journal: Journal,
        limits_of: Callable[[pb.ModelIdentity], Limits],
        default_mode: pb.VerifyMode.ValueType,
        resume_secret: bytes,
    ) -> None:
        """`default_mode` is how to verify when a request does not say; `resume_secret` is the key of resume tokens."""
        self._fleet = fleet
        self._journal = journal
        self._limits_of = limits_of
        self._default_mode = default_mode
        self._resume_secret = resume_secret

    async def plan(self, body: api.GenerateRequest, request: Request, caller: Caller) -> Plan:
        """Return what to decode, and note in `request` whose it is.

        Raises:
            SpecdecError: the request is bad, or nothing is served that it could be for.
        """
        served = self._fleet.require_served()
        if body.model and body.model != served.identity.name:
            raise ModelNotFound(f"model {body.model!r} is not served here, {served.identity.name!r} is")
        check_request_id(body.request_id)
        request.key = RequestKey(caller.tenant, body.request_id or uuid.uuid4().hex)
        request.priority = body.priority
        request.cache_salt, request.deadline_s = caller.cache_salt, caller.deadline_s
        request.model = served.identity
        model_limits = self._limits_of(served.identity)
        limits = model_limits.within(caller.allowance)
        sampling = check_sampling(body.sampling, limits)
        speculation = check_speculation(body.speculation, self._default_mode)
        with request.trace.phase("tokenize"):
            prompt = await PromptReader(served.tokenizer, limits).read(body, sampling)
        max_tokens = resolve_max_tokens(sampling, len(prompt), limits)
        request.trace.accepted(request, body, sampling, max_tokens)
        is_resume = body.HasField("resume")
        if is_resume and not body.request_id:
            raise InvalidRequest("request_id", "a resumed request is sent with its id")
        if is_resume and not body.sampling.HasField("seed"):
            raise InvalidRequest("sampling.seed", "a resumed request is sent with the seed of its first chunk")
        seed = body.sampling.seed if body.sampling.HasField("seed") else secrets.randbits(64)
        resume_token = make_resume_token(self._resume_secret, *request.key, seed, served.identity)
        journal_params = encode_params(body, prompt, seed)
        held = [HeldChoice() for _ in range(sampling.n)]
        if is_resume:
            check_resume_token(body.resume.resume_token, resume_token)
            held = await self._held(body, request, sampling, journal_params)
        return Plan(
            served=served,
            prompt=prompt,
            sampling=sampling,
            speculation=speculation,
            max_tokens=max_tokens,
            max_model_len=model_limits.max_model_len,
            seed=seed,
            resume_token=resume_token,
            is_resume=is_resume,
            journal_params=journal_params,
            held=held,
        )

    async def _held(
        self, body: api.GenerateRequest, request: Request, sampling: CheckedSampling, journal_params: bytes
    ) -> list[HeldChoice]:
        record = await self._journal.load(request.key)
        if record is not None:
            check_params(record.params, journal_params, str(body.WhichOneof("input")))
        with_logprobs = sampling.token_sampling.HasField("num_logprobs")
        return held_choices(body.resume, sampling.n, record, request.model.vocab_size, with_logprobs)
