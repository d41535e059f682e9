"""The gRPC side of CoordinatorService: from wire messages to calls and back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from coordinator.generation import Generator
from coordinator.intake.admission import AdmissionQueue
from coordinator.intake.planning import Caller
from coordinator.intake.prompt import PromptReader
from coordinator.intake.prompt_bytes import PromptBytes
from coordinator.intake.tokenizing import TokenizingTurns
from coordinator.intake.utf8 import find_invalid_utf8
from coordinator.intake.validation import Limits, check_detokenized
from coordinator.replicas.fleet import Fleet
from coordinator.replicas.registry_view import RegistryView
from coordinator.tenants.api_keys import AUTHORIZATION_KEY, Authenticator
from coordinator.tenants.quotas import Allowance
from coordinator.text.tokenizer import TextTokenizer
from specdec import __version__
from specdec.rpc.errors import InvalidRequest
from specdec.telemetry.tracing import TRACE_HEADERS
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api

SERVICE_NAME = "specdec.v1.CoordinatorService"
TENANT_KEY = "specdec-tenant"
"""Request metadata: whose ids and prefix cache are used."""
_MAX_TENANT_CHARS = 128
"""As many as the file of API keys allows: it is part of keys in the store."""


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands in for a request that does not parse; gRPC itself would answer INTERNAL."""

    field: str
    cause: str


class CoordinatorServicer:
    """Answers clients. Errors are raised as SpecdecErrors; the server turns them into statuses."""

    def __init__(
        self,
        *,
        generator: Generator,
        fleet: Fleet,
        admission: AdmissionQueue,
        limits_of: Callable[[pb.ModelIdentity], Limits],
        default_mode: pb.VerifyMode.ValueType,
        authenticator: Authenticator,
        owner_id: str,
        degraded: Callable[[], list[str]],
        registry: RegistryView | None,
        turns: TokenizingTurns,
        prompt_bytes: PromptBytes,
    ) -> None:
        """Answer nothing yet.

        Args:
            generator: runs Generate calls.
            fleet: knows what is served, and by whom.
            admission: knows how many requests run and wait.
            limits_of: what clients may ask of a model here.
            default_mode: how to verify when a request does not say.
            authenticator: knows who calls.
            owner_id: this coordinator's name.
            degraded: what works less well than it should, for people.
            registry: who else has registered; None without a shared store.
            turns: where long texts are tokenised.
            prompt_bytes: budgets that texts to tokenise count against, as prompts do.
        """
        self._turns = turns
        self._prompt_bytes = prompt_bytes
        self._generator = generator
        self._fleet = fleet
        self._admission = admission
        self._limits_of = limits_of
        self._default_mode = default_mode
        self._authenticator = authenticator
        self._owner_id = owner_id
        self._registry = registry
        self._degraded = degraded

    def register(self, server: grpc.aio.Server) -> None:
        """Add the handlers to a server."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        handlers = {
            "Generate": self._handler(stream, self.generate, api.GenerateRequest),
            "Abort": self._handler(unary, self.abort, api.AbortRequest),
            "Tokenize": self._handler(unary, self.tokenize, api.TokenizeRequest),
            "Detokenize": self._handler(unary, self.detokenize, api.DetokenizeRequest),
            "GetModelInfo": self._handler(unary, self.get_model_info, api.GetModelInfoRequest),
            "GetStatus": self._handler(unary, self.get_status, api.GetStatusRequest),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    async def generate(self, request: api.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Generates one or more choices for a prompt and streams them."""
        remaining_s: Any = context.time_remaining()  # None without a deadline, whatever the stubs say
        deadline_s = None if remaining_s is None else time.monotonic() + remaining_s
        tenant, allowance = self._identify(context)
        trace_headers = {name: values[0] for name in TRACE_HEADERS if (values := _metadata(context, name))}
        caller = Caller(tenant, deadline_s, allowance, trace_headers)
        await self._generator.run(request, caller, context.write)

    async def abort(self, request: api.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]) -> api.AbortResponse:
        """Ends a running request."""
        tenant, _ = self._identify(context)
        return api.AbortResponse(aborted=await self._generator.abort(tenant, request.request_id))

    async def tokenize(
        self, request: api.TokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> api.TokenizeResponse:
        """Text or chat messages to token ids."""
        tenant, allowance = self._identify(context)
        with self._prompt_bytes.hold(tenant, request.ByteSize()):
            return await self._tokenize(request, tenant, allowance.weight)

    async def _tokenize(self, request: api.TokenizeRequest, tenant: str, weight: float) -> api.TokenizeResponse:
        served = self._fleet.require_served(request.model)
        reader = PromptReader(served.tokenizer, self._limits_of(served.identity), self._turns, tenant, weight)
        add_special = request.add_special_tokens if request.HasField("add_special_tokens") else None
        match request.WhichOneof("input"):
            case "text":
                token_ids = await reader.encode("text", request.text, add_special is not False) if request.text else []
            case "messages":
                token_ids = await reader.encode("messages", reader.render(request.messages), bool(add_special))
            case _:
                raise InvalidRequest("input", "one of text and messages is required")
        return await asyncio.to_thread(_tokenized, served.tokenizer, token_ids)

    async def detokenize(
        self, request: api.DetokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> api.DetokenizeResponse:
        """Token ids to text."""
        served = self._fleet.require_served(request.model)
        check_detokenized(request.token_ids, self._limits_of(served.identity))
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        return api.DetokenizeResponse(
            text=await asyncio.to_thread(served.tokenizer.decode, list(request.token_ids), skip)
        )

    async def get_model_info(
        self, request: api.GetModelInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> api.GetModelInfoResponse:
        """What is served."""
        _, allowance = self._identify(context)
        served = self._fleet.require_served()
        limits = self._limits_of(served.identity).within(allowance)
        draft = self._fleet.pick_draft(0)
        return api.GetModelInfoResponse(
            target=served.identity,
            draft=None if draft is None else draft.identity,
            default_verify_mode=self._default_mode,
            max_model_len=limits.max_model_len,
            max_tokens_limit=limits.max_tokens,
            max_choices=limits.max_choices,
            max_draft_tokens=limits.max_draft_tokens,
            has_chat_template=served.tokenizer.has_chat_template,
        )

    async def get_status(
        self, request: api.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> api.GetStatusResponse:
        """Replicas, load and limits."""
        replicas = [
            api.ReplicaStatus(
                role=link.role,
                address=link.address,
                state=str(link.state),
                detail=link.detail,
                identity=link.identity,
                load=link.load,
            )
            for link in self._fleet.links
        ]
        linked = {(replica.role, replica.address) for replica in replicas}
        loading = [r for role in ("target", "draft") for r in self._registered(role) if (role, r.address) not in linked]
        return api.GetStatusResponse(
            version=__version__,
            replicas=[*replicas, *loading],
            coordinators=self._registered("coordinator"),
            num_running=self._admission.num_running,
            num_waiting=self._admission.num_waiting,
            max_running=self._admission.max_running,
            max_waiting=self._admission.max_waiting,
            owner_id=self._owner_id,
            degraded=self._degraded(),
        )

    def _registered(self, role: str) -> list[api.ReplicaStatus]:
        records = () if self._registry is None else self._registry.records(role)
        return [
            api.ReplicaStatus(role=role, address=r.address, state=r.state, identity=r.info.identity, load=r.info.load)
            for r in records
        ]

    def _handler(self, make: Callable[..., Any], behavior: Callable[..., Any], request_type: type[Message]) -> Any:
        def deserialize(data: bytes) -> Message | _Malformed:
            try:
                return request_type.FromString(data)
            except DecodeError as error:
                field = find_invalid_utf8(request_type.DESCRIPTOR, data)
                if field is not None:
                    return _Malformed(field, "is not UTF-8")
                return _Malformed("request", f"does not parse: {error}")

        async def checked(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            self._identify(context)  # before anything else is told, of every call
            if isinstance(request, _Malformed):
                raise InvalidRequest(request.field, request.cause, reason="MALFORMED_MESSAGE")
            return await behavior(request, context)

        return make(
            checked,
            request_deserializer=deserialize,
            response_serializer=lambda response: response.SerializeToString(),
        )

    def _identify(self, context: grpc.aio.ServicerContext[Any, Any]) -> tuple[str, Allowance]:
        """The caller's tenant and allowance. Raises Unauthenticated or PermissionDenied."""
        return self._authenticator.identify(_metadata(context, AUTHORIZATION_KEY), _tenant(context))


def _tokenized(tokenizer: TextTokenizer, token_ids: list[int]) -> api.TokenizeResponse:
    texts = [tokenizer.detokenizers.token_text(token_id) for token_id in token_ids]
    return api.TokenizeResponse(token_ids=token_ids, tokens=texts)


def _tenant(context: grpc.aio.ServicerContext[Any, Any]) -> str | None:
    for tenant in _metadata(context, TENANT_KEY):
        if len(tenant) > _MAX_TENANT_CHARS:
            raise InvalidRequest(TENANT_KEY, f"must be at most {_MAX_TENANT_CHARS} characters")
        return tenant
    return None


def _metadata(context: grpc.aio.ServicerContext[Any, Any], name: str) -> list[str]:
    values = [value for key, value in context.invocation_metadata() or () if key == name]
    return [value if isinstance(value, str) else value.decode("utf-8", "replace") for value in values]
