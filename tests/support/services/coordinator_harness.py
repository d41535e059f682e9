"""A real coordinator with scripted replicas, in one event loop and over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from specdec.config import CoordinatorSettings
from specdec.coordinator.service import CoordinatorService
from specdec.coordinator.timings import Timings
from specdec.service.server import build_server
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import coordinator_pb2_grpc as api_grpc
from specdec.wire.errors import SpecdecError, from_rpc_error
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.model import next_token
from tests.support.scripted.replica import PATIENCE_S, ScriptedReplica
from tests.support.scripted.target import ScriptedTarget


@dataclass
class Harness:
    """A running coordinator, with its client and metrics."""

    service: CoordinatorService
    server: grpc.aio.Server
    stub: api_grpc.CoordinatorServiceStub
    channel: grpc.aio.Channel
    registry: CollectorRegistry
    address: str
    unchanged_s: float = 0.0
    """Seconds that `replica_changed` has waited in vain."""

    def metric(self, name: str, **labels: str) -> float:
        """A sample's value; 0 if there is no such sample."""
        return self.registry.get_sample_value(f"specdec_coordinator_{name}", labels) or 0.0

    async def replica_changed(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until some replica's state changes, or for a second: it may have changed since the caller looked.

        Raises TimeoutError if no state has changed for `timeout_s`.
        """
        try:
            await asyncio.wait_for(self.service.fleet.wait_changed(), 1.0)
            self.unchanged_s = 0.0
        except TimeoutError:
            self.unchanged_s += 1.0
            if self.unchanged_s >= timeout_s:
                raise

    async def replica_until(self, role: str, state: str, timeout_s: float = PATIENCE_S) -> api.ReplicaStatus:
        """Wait until some replica of a role is in a state."""
        link = next(link for link in self.service.fleet.links if link.role == role)
        while str(link.state) != state:
            await self.replica_changed(timeout_s)
        status = await self.stub.GetStatus(api.GetStatusRequest())
        return next(r for r in status.replicas if r.role == role)

    async def all_ready(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until all replicas are ready; the coordinator itself serves from its first ready target on."""
        for link in self.service.fleet.links:
            while not link.is_ready:
                await self.replica_changed(timeout_s)


@dataclass
class Result:
    """The parts of a stream."""

    started: api.GenerateStarted | None = None
    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[api.OutputToken]] = field(default_factory=dict)
    ended: dict[int, api.ChoiceFinished] = field(default_factory=dict)
    finished: api.GenerateFinished | None = None
    prompt_logprobs: api.PromptLogprobs | None = None
    chunks: list[str] = field(default_factory=list)

    def add(self, chunk: api.GenerateResponse) -> None:
        kind = chunk.WhichOneof("chunk")
        self.chunks.append(str(kind))
        if kind == "delta":
            index = chunk.delta.index
            self.texts[index] = self.texts.get(index, "") + chunk.delta.text
            self.tokens.setdefault(index, []).extend(chunk.delta.tokens)
        elif kind == "choice_finished":
            self.ended[chunk.choice_finished.index] = chunk.choice_finished
        elif kind == "prompt_logprobs" and self.prompt_logprobs is not None:
            held = self.prompt_logprobs
            assert chunk.prompt_logprobs.start_position == held.start_position + len(held.token_ids)
            held.token_ids.extend(chunk.prompt_logprobs.token_ids)
            held.positions.extend(chunk.prompt_logprobs.positions)
        elif kind is not None:
            setattr(self, kind, getattr(chunk, kind))

    def ids(self, index: int = 0) -> list[int]:
        return [token.id for token in self.tokens.get(index, [])]

    def origins(self, index: int = 0) -> list[int]:
        return [token.origin for token in self.tokens.get(index, [])]


async def collect(call: Any) -> Result:
    """Read a stream to its end."""
    result = Result()
    while (chunk := await call.read()) is not grpc.aio.EOF:
        result.add(chunk)
    return result


async def read_tokens(call: Any, num: int) -> Result:
    """Read a stream until it has `num` tokens of the first choice."""
    result = Result()
    while len(result.ids()) < num:
        result.add(await call.read())
    return result


async def finish(call: Any, result: Result) -> Result:
    """Read the rest of a stream."""
    while (chunk := await call.read()) is not grpc.aio.EOF:
        result.add(chunk)
    return result


async def error_of(call: Any) -> SpecdecError:
    """The typed error at the end of a call or of the rest of a stream."""
    with pytest.raises(grpc.RpcError) as caught:
        if hasattr(call, "read"):
            await collect(call)
        else:
            await call
    return from_rpc_error(caught.value)


def request(prompt_ids: Sequence[int] = (5, 6, 7), **fields: Any) -> api.GenerateRequest:
    """A request by token ids, seeded; keyword arguments are sampling parameters or fields of the request."""
    names = {f.name for f in api.SamplingParams.DESCRIPTOR.fields}
    sampling = {"seed": 11, "max_tokens": 20, **{k: v for k, v in fields.items() if k in names}}
    rest = {k: v for k, v in fields.items() if k not in names}
    rest.setdefault("prompt_logprobs_in_parts", "prompt_logprobs" in sampling)
    body = api.GenerateRequest(sampling=api.SamplingParams(**sampling), **rest)
    if body.WhichOneof("input") is None:
        body.prompt_token_ids.token_ids.extend(prompt_ids)
    return body


def resumed(first: Result, body: api.GenerateRequest, **held: Any) -> api.GenerateRequest:
    """The request that resumes a stream after `first`; `held` replaces fields of the first choice."""
    assert first.started is not None
    again = api.GenerateRequest()
    again.CopyFrom(body)
    again.request_id = first.started.request_id
    again.sampling.seed = first.started.seed
    again.resume.resume_token = first.started.resume_token
    for index in first.tokens:
        text = first.texts[index].encode()
        choice = api.ResumeChoice(index=index, token_ids=first.ids(index), text_offset_bytes=len(text))
        again.resume.choices.append(choice)
    for name, value in held.items():
        setattr(again.resume.choices[0], name, value)
    return again


def expected_ids(
    target: ScriptedTarget, num: int, prompt: Sequence[int] = (5, 6, 7), seed: int = 11, choice: int = 0
) -> list[int]:
    """The made-up model's output tokens."""
    tokens = list(prompt)
    for _ in range(num):
        tokens.append(next_token(tokens, seed, choice, target.identity.vocab_size))
    return tokens[len(prompt) :]


@asynccontextmanager
async def running(
    targets: Sequence[ScriptedTarget],
    drafts: Sequence[ScriptedDraft] = (),
    /,
    *,
    wait_for_draft: bool = True,
    **changes: Any,
) -> AsyncIterator[Harness]:
    """Run a coordinator with these replicas, which are started unless they have a port.

    `changes`: fields of the settings and of `Timings`.
    """
    replicas: list[ScriptedReplica] = [*targets, *drafts]
    for replica in replicas:
        if replica.port == 0:
            await replica.start()
    timings = {"reconnect_first_s": 0.01, "draft_reopen_s": 0.01}
    timings |= {one.name: changes.pop(one.name) for one in fields(Timings) if one.name in changes}
    settings = CoordinatorSettings(
        **{
            "host": "127.0.0.1",
            "port": 0,
            "metrics_port": None,
            "targets": tuple(t.address for t in targets),
            "drafts": tuple(d.address for d in drafts),
            "reconnect_backoff_max_s": 0.05,
            "target_timeout_s": 5.0,
            "resume_secret": "a-secret-of-the-tests",
            "owner_id": "coordinator-1",
            **changes,
        }
    )
    registry = CollectorRegistry()
    service = CoordinatorService(settings, registry, Timings(**timings))
    server, port = build_server(settings, tls=None)
    service.register(server)
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    stub = api_grpc.CoordinatorServiceStub(channel)
    harness = Harness(service, server, stub, channel, registry, f"127.0.0.1:{port}")
    try:
        await service.start()
        if drafts and wait_for_draft:
            await harness.replica_until("draft", "ready")
        yield harness
    finally:
        await channel.close()
        await server.stop(0)
        await service.stop()
        for replica in replicas:
            await replica.stop()
