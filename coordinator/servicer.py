"""The gRPC side of CoordinatorService: from wire messages to calls and back."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import grpc
from google.protobuf.message import Message

from specdec import __version__
from specdec.config.drafter_options import DRAFT_MODEL
from specdec.coordinator.generation import GenerateCalls
from specdec.coordinator.intake.admission import AdmissionQueue
from specdec.coordinator.intake.conversions import Conversions
from specdec.coordinator.intake.planning import RequestCaller
from specdec.coordinator.intake.reading import read_request, receive_request
from specdec.coordinator.intake.validation import Limits
from specdec.coordinator.replicas.fleet import Fleet
from specdec.coordinator.replicas.registry_view import RegistryView
from specdec.coordinator.replicas.status import describe_replicas
from specdec.coordinator.tenants.api_keys import AUTHORIZATION_KEY, Authenticator
from specdec.coordinator.tenants.quotas import Allowance
from specdec.telemetry.tracing import TRACE_HEADERS
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.abort import write_to
from specdec.wire.errors import InvalidRequest

SERVICE_NAME = "specdec.v1.CoordinatorService"
TENANT_KEY = "specdec-tenant"
"""Metadata key of the tenant, which owns request ids and prefix cache."""
_MAX_TENANT_CHARS = 128
"""Characters of a tenant's name, as in the file of API keys: the name is part of keys in the store."""


class CoordinatorServicer:
    """Answers clients' calls. Errors are raised as SpecdecErrors, which the server turns into statuses."""

    def __init__(
        self,
        *,
        generator: GenerateCalls,
        fleet: Fleet,
        admission: AdmissionQueue,
        limits_of: Callable[[pb.ModelIdentity], Limits],
        default_mode: pb.VerifyMode.ValueType,
        authenticator: Authenticator,
        owner_id: str,
        degraded: Callable[[], list[str]],
        registry: RegistryView | None,
        conversions: Conversions,
        request_read_s: float,
    ) -> None:
        """Answer nothing yet.

        Args:
            generator: runs Generate calls.
            fleet: knows replicas and the served model.
            admission: knows the numbers of running and waiting requests.
            limits_of: returns what clients may ask of a model.
            default_mode: verification mode of requests that name none.
            authenticator: identifies callers.
            owner_id: this coordinator's name.
            degraded: returns descriptions of degraded functions.
            registry: lists other processes; None without a shared store.
            conversions: answers Tokenize and Detokenize.
            request_read_s: seconds that a client may take to send a request.
        """
        self._request_read_s = request_read_s
        self._conversions = conversions
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
        # Declared as streams of requests, equal on the wire: gRPC would wait for a unary request for ever.
        unary, stream = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
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
        remaining_s: Any = context.time_remaining()  # None without a deadline, unlike its annotation
        deadline_s = None if remaining_s is None else time.monotonic() + remaining_s
        tenant, allowance = self._identify(context)
        trace_headers = {name: values[0] for name in TRACE_HEADERS if (values := _metadata(context, name))}
        caller = RequestCaller(tenant, deadline_s, allowance, trace_headers, held=_until_answered(context))
        await self._generator.run(request, caller, functools.partial(write_to, context))

    async def abort(self, request: api.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]) -> api.AbortResponse:
        """Ends a running request."""
        tenant, _ = self._identify(context)
        return api.AbortResponse(aborted=await self._generator.abort(tenant, request.request_id))

    async def tokenize(self, request: api.TokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        """Text or chat messages to token ids."""
        tenant, allowance = self._identify(context)
        return await self._conversions.tokenize(request, tenant, allowance.weight, _until_answered(context))

    async def detokenize(self, request: api.DetokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        """Token ids to text."""
        tenant, allowance = self._identify(context)
        return await self._conversions.detokenize(request, tenant, allowance.weight, _until_answered(context))

    async def get_model_info(
        self, request: api.GetModelInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> api.GetModelInfoResponse:
        """The served model and the caller's limits."""
        _, allowance = self._identify(context)
        served = self._fleet.require_served()
        limits = self._limits_of(served.identity).within(allowance)
        connected = self._fleet.pick_draft(0)
        draft = self._fleet.own_draft() if connected is None else connected.identity
        return api.GetModelInfoResponse(
            target=served.identity,
            draft=draft,
            default_verify_mode=self._default_mode,
            max_model_len=limits.max_model_len,
            max_tokens_limit=limits.max_tokens,
            max_choices=limits.max_choices,
            max_draft_tokens=limits.max_draft_tokens,
            has_chat_template=served.tokenizer.has_chat_template,
            tokenizer=served.tokenizer.describe() if request.with_tokenizer else None,
            drafters=[*([DRAFT_MODEL] if draft is not None else []), *self._fleet.drafters()],
        )

    async def get_status(
        self, request: api.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> api.GetStatusResponse:
        """Replicas, load and limits."""
        status = describe_replicas(self._fleet, self._registry)
        status.MergeFrom(
            api.GetStatusResponse(
                version=__version__,
                num_running=self._admission.num_running,
                num_waiting=self._admission.num_waiting,
                max_running=self._admission.max_running,
                max_waiting=self._admission.max_waiting,
                owner_id=self._owner_id,
                degraded=self._degraded(),
            )
        )
        return status

    def _handler(self, make: Callable[..., Any], behavior: Callable[..., Any], request_type: type[Message]) -> Any:
        async def checked(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            self._identify(context)  # before the request is even received
            data = await receive_request(context, self._request_read_s)
            return await behavior(read_request(request_type, data), context)

        return make(
            checked,
            request_deserializer=None,
            response_serializer=_encode,
        )

    def _identify(self, context: grpc.aio.ServicerContext[Any, Any]) -> tuple[str, Allowance]:
        """The caller's tenant and allowance. Raises Unauthenticated or PermissionDenied."""
        return self._authenticator.identify(_metadata(context, AUTHORIZATION_KEY), _tenant(context))


def _until_answered(context: grpc.aio.ServicerContext[Any, Any]) -> ExitStack:
    """A stack that closes when the call has ended, with the answer sent or the caller gone."""
    held = ExitStack()
    when_done: Any = context.add_done_callback  # its annotation is wrong
    when_done(lambda _: held.close())
    return held


def _encode(response: Message | bytes) -> bytes:
    return response if isinstance(response, bytes) else response.SerializeToString()


def _tenant(context: grpc.aio.ServicerContext[Any, Any]) -> str | None:
    for tenant in _metadata(context, TENANT_KEY):
        if len(tenant) > _MAX_TENANT_CHARS:
            raise InvalidRequest(TENANT_KEY, f"must be at most {_MAX_TENANT_CHARS} characters")
        return tenant
    return None


def _metadata(context: grpc.aio.ServicerContext[Any, Any], name: str) -> list[str]:
    values = [value for key, value in context.invocation_metadata() or () if key == name]
    return [value if isinstance(value, str) else value.decode("utf-8", "replace") for value in values]
