"""The gRPC side of CoordinatorService: from wire messages to calls and back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import grpc

from specdec import __version__
from specdec.config.drafter_options import DRAFT_MODEL
from specdec.coordinator.generation import GenerateCalls
from specdec.coordinator.intake.admission import AdmissionQueue
from specdec.coordinator.intake.callers import Callers, until_answered
from specdec.coordinator.intake.conversions import Conversions
from specdec.coordinator.intake.validation import Limits
from specdec.coordinator.replicas.fleet import Fleet
from specdec.coordinator.replicas.registry_view import RegistryView
from specdec.coordinator.replicas.status import describe_replicas
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.abort import write_to

SERVICE_NAME = "specdec.v1.CoordinatorService"


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
        callers: Callers,
        owner_id: str,
        degraded: Callable[[], list[str]],
        registry: RegistryView | None,
        conversions: Conversions,
    ) -> None:
        """Answer nothing yet.

        Args:
            generator: runs Generate calls.
            fleet: knows replicas and the served model.
            admission: knows the numbers of running and waiting requests.
            limits_of: returns what clients may ask of a model.
            default_mode: verification mode of requests that name none.
            callers: identifies callers.
            owner_id: this coordinator's name.
            degraded: returns descriptions of degraded functions.
            registry: lists other processes; None without a shared store.
            conversions: answers Tokenize and Detokenize.
        """
        self._conversions = conversions
        self._generator = generator
        self._fleet = fleet
        self._admission = admission
        self._limits_of = limits_of
        self._default_mode = default_mode
        self._callers = callers
        self._owner_id = owner_id
        self._registry = registry
        self._degraded = degraded

    def register(self, server: grpc.aio.Server) -> None:
        """Add the handlers to a server."""
        unary, stream = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        handlers = {
            "Generate": self._callers.handler(stream, self.generate, api.GenerateRequest),
            "Abort": self._callers.handler(unary, self.abort, api.AbortRequest),
            "Tokenize": self._callers.handler(unary, self.tokenize, api.TokenizeRequest),
            "Detokenize": self._callers.handler(unary, self.detokenize, api.DetokenizeRequest),
            "GetModelInfo": self._callers.handler(unary, self.get_model_info, api.GetModelInfoRequest),
            "GetStatus": self._callers.handler(unary, self.get_status, api.GetStatusRequest),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    async def generate(self, request: api.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Generates one or more choices for a prompt and streams them."""
        caller = self._callers.request_caller(context, until_answered(context))
        await self._generator.generate(request, caller, functools.partial(write_to, context))

    async def abort(self, request: api.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]) -> api.AbortResponse:
        """Ends a running request."""
        tenant, _ = self._callers.identify(context)
        return api.AbortResponse(aborted=await self._generator.abort(tenant, request.request_id))

    async def tokenize(self, request: api.TokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        """Text or chat messages to token ids."""
        tenant, allowance = self._callers.identify(context)
        return await self._conversions.tokenize(request, tenant, allowance.weight, until_answered(context))

    async def detokenize(self, request: api.DetokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        """Token ids to text."""
        tenant, allowance = self._callers.identify(context)
        return await self._conversions.detokenize(request, tenant, allowance.weight, until_answered(context))

    async def get_model_info(
        self, request: api.GetModelInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> api.GetModelInfoResponse:
        """The served model and the caller's limits."""
        _, allowance = self._callers.identify(context)
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
