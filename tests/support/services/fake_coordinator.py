"""A coordinator without models: a real gRPC server with fixed answers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc
from google.rpc import status_pb2
from grpc_status import rpc_status

from specdec.v1 import common_pb2, coordinator_pb2, coordinator_pb2_grpc
from specdec.wire.errors import InvalidRequest, ModelNotFound, Overloaded, SpecdecError, to_status

WORDS = ["    if", " n", " <", " 2", ":", "\n", "        return", " n", "\n"]
ORIGINS = [
    common_pb2.ORIGIN_PREFILL,
    common_pb2.ORIGIN_DRAFT,
    common_pb2.ORIGIN_DRAFT,
    common_pb2.ORIGIN_RECOVERED,
    common_pb2.ORIGIN_DRAFT,
    common_pb2.ORIGIN_DRAFT,
    common_pb2.ORIGIN_BONUS,
    common_pb2.ORIGIN_DECODE,
    common_pb2.ORIGIN_DECODE,
]
TEXT = "".join(WORDS)
TARGET = common_pb2.ModelIdentity(
    name="big", architecture="LlamaForCausalLM", num_parameters=15_800_000, dtype="float32", device="cpu"
)


class FakeCoordinator(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Records requests; answers TEXT, or an error by the request's fields."""

    def __init__(self) -> None:
        self.requests: list[coordinator_pb2.GenerateRequest] = []
        self.plain_differs = False
        self.unavailable_times = 0
        self.refusal: SpecdecError | None = None
        self.has_draft = False
        self.drafters: list[str] = []

    def Generate(
        self, request: coordinator_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[coordinator_pb2.GenerateResponse]:
        self.requests.append(request)
        if self.unavailable_times > 0:
            self.unavailable_times -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "starting")
        if self.refusal is not None:
            _abort(context, self.refusal)
        if request.sampling.temperature > 2:
            _abort(context, InvalidRequest("sampling.temperature", "must be in [0, 2]"))
        if request.model == "missing":
            _abort(context, ModelNotFound("model 'missing' is not served"))
        if request.prompt == "overload":
            _abort(context, Overloaded("320 requests run or wait", retry_after_s=2.5))
        yield from self._answer(request)

    def _answer(self, request: coordinator_pb2.GenerateRequest) -> Iterator[coordinator_pb2.GenerateResponse]:
        speculates = request.speculation.enabled or not request.speculation.HasField("enabled")
        seed = request.sampling.seed if request.sampling.HasField("seed") else 4711
        num_choices = request.sampling.n or 1
        started = coordinator_pb2.GenerateStarted(request_id="r", seed=seed, model=TARGET, notices=["a limit"])
        started.is_constrained = request.sampling.HasField("constraint")
        started.is_salted = bool(request.cache_salt)
        yield coordinator_pb2.GenerateResponse(started=started)
        if request.sampling.HasField("prompt_logprobs"):
            positions = [common_pb2.PositionLogprobs(logprob=logprob) for logprob in (-1.5, -2.5)]
            prompt_logprobs = coordinator_pb2.PromptLogprobs(token_ids=[31, 32, 33], positions=positions)
            yield coordinator_pb2.GenerateResponse(prompt_logprobs=prompt_logprobs)
        for number, (word, origin) in enumerate(zip(WORDS, ORIGINS, strict=True)):
            for choice in range(num_choices):
                token_id = 100 + number + (self.plain_differs and not speculates and number > 3)
                token = coordinator_pb2.OutputToken(id=token_id, text=word)
                token.origin = origin if speculates else common_pb2.ORIGIN_DECODE
                if request.sampling.HasField("logprobs"):
                    token.logprobs.logprob = -0.25
                delta = coordinator_pb2.ChoiceDelta(index=choice, text=word, tokens=[token])
                yield coordinator_pb2.GenerateResponse(delta=delta)
        stats = coordinator_pb2.SpeculationStats(num_steps=5 if speculates else 8)
        if speculates:
            stats.num_verify_steps, stats.num_proposed, stats.num_accepted = 2, 6, 4
            stats.verified_by_depth.extend([2, 2, 2])
            stats.accepted_by_depth.extend([2, 1, 1])
            stats.mean_acceptance_length = 3.0
        for choice in range(num_choices):
            finished = coordinator_pb2.ChoiceFinished(index=choice, reason=common_pb2.FINISH_REASON_STOP)
            yield coordinator_pb2.GenerateResponse(choice_finished=finished)
        usage = coordinator_pb2.Usage(prompt_tokens=3, completion_tokens=len(WORDS) * num_choices)
        finish = coordinator_pb2.GenerateFinished(usage=usage, stats=stats)
        yield coordinator_pb2.GenerateResponse(finished=finish)

    def GetModelInfo(
        self, request: coordinator_pb2.GetModelInfoRequest, context: grpc.ServicerContext
    ) -> coordinator_pb2.GetModelInfoResponse:
        return coordinator_pb2.GetModelInfoResponse(
            target=TARGET,
            draft=TARGET if self.has_draft else None,
            default_verify_mode=common_pb2.VERIFY_MODE_COUPLED,
            max_model_len=2048,
            drafters=self.drafters,
        )

    def GetStatus(
        self, request: coordinator_pb2.GetStatusRequest, context: grpc.ServicerContext
    ) -> coordinator_pb2.GetStatusResponse:
        replica = coordinator_pb2.ReplicaStatus(
            role="target", address="127.0.0.1:50052", state="ready", identity=TARGET
        )
        down = coordinator_pb2.ReplicaStatus(role="draft", address="127.0.0.1:50053", state="down", detail="[refused]")
        other = coordinator_pb2.ReplicaStatus(role="coordinator", address="10.0.0.9:50051", state="draining")
        return coordinator_pb2.GetStatusResponse(
            version="0.1.0",
            replicas=[replica, down],
            max_running=64,
            coordinators=[other],
            degraded=["Redis does not answer [or hangs]"],
        )


def _abort(context: grpc.ServicerContext, error: SpecdecError) -> None:
    status: status_pb2.Status = to_status(error)
    context.abort_with_status(rpc_status.to_status(status))


@contextmanager
def running_fake_coordinator(
    credentials: grpc.ServerCredentials | None = None, *, servicer: FakeCoordinator | None = None
) -> Iterator[tuple[FakeCoordinator, str]]:
    """Run one, or `servicer`; yields the servicer and its address. With credentials it speaks TLS."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    servicer = servicer or FakeCoordinator()
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(servicer, server)
    anywhere = "127.0.0.1:0"
    port = server.add_insecure_port(anywhere) if credentials is None else server.add_secure_port(anywhere, credentials)
    server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
