"""Objects shared by all routes of a gateway."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from starlette.requests import Request

from specdec.gateway.chat.template_parsers import ParserPair
from specdec.gateway.http.body import BodyReader
from specdec.gateway.http.events import while_connected
from specdec.gateway.openness import Openness
from specdec.gateway.parser_names import ParserNames
from specdec.gateway.settings import GatewaySettings
from specdec.gateway.upstream.caller import CallerStub
from specdec.gateway.upstream.coordinators import Coordinators, Health
from specdec.gateway.upstream.vocabulary import Vocabulary
from specdec.telemetry import GatewayMetrics, PickerMetrics, VllmMetrics
from specdec.v1 import coordinator_pb2 as api


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one gateway."""

    settings: GatewaySettings
    coordinators: Coordinators
    health: Health
    reader: BodyReader
    registry: CollectorRegistry
    metrics: GatewayMetrics
    vllm: VllmMetrics
    picker: PickerMetrics
    parser_names: Mapping[str, ParserNames]
    """By entry of the coordinators' `models`."""
    openness: Openness
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    created_s: int = field(default_factory=lambda: int(time.time()))
    """Unix time of its start, reported as the creation time of its models."""

    def caller(self, request: Request, model: str | None, *, holds: bool = True) -> CallerStub:
        """The coordinators of a model for the client of a request, with its key and its trace.

        Its calls raise NotReady until it is known that clients need a key where they must. `holds`: they wait for a
        model that is not served, if requests are held.
        """
        caller = self.coordinators.caller(request.state.metadata, request.state.held, model or "")
        arrived_s = request.state.arrived_s if holds else float("-inf")
        caller.wait_for_model(self.health.hold, arrived_s, self.openness.check)
        return caller

    async def parsers_of(self, request: Request, model: str | None, *, streams: bool) -> ParserPair:
        """The parsers of a model's output. Raises SpecdecError if none of its coordinators answers.

        `streams`: the answer is a stream, which begins while the request is held.
        """
        if self.health.hold.holds:  # Before the question, which one caller asks for all.
            async with request.state.sent.kept_alive(self.settings.keep_alive_s if streams else None):
                await while_connected(request.receive, self.caller(request, model).until_served())
        names = self.parser_names[self.coordinators.serving(model or "")]
        return await names.of(lambda: self.caller(request, model))

    def on_finished(self, finished: api.GenerateFinished) -> None:
        """Count a finished request's tokens."""
        usage, stats = finished.usage, finished.stats
        self.metrics.prompt_tokens.inc(usage.prompt_tokens)
        self.metrics.output_tokens.inc(usage.completion_tokens)
        self.vllm.drafts.inc(stats.num_verify_steps)
        self.vllm.draft_tokens.inc(stats.num_proposed)
        self.vllm.accepted_tokens.inc(stats.num_accepted)
        for position, num_accepted in enumerate(stats.accepted_by_depth):
            self.vllm.accepted_per_position.labels(position).inc(num_accepted)
