"""Requests, streams read step by step, frozen and added services, and reports of load, for tests of failures."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
from prometheus_client.parser import text_string_to_metric_families

from specdec.client import Client, ClientSettings, Completion
from specdec.commands.up.cluster import Cluster, RoleSettings, free_port, service_spec
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from tests.support.releases import Build
from tests.support.services.clusters import TIMEOUTS

ROLES = ("target", "draft", "coordinator")
PATIENCE_S = 60.0
POLL_S = 0.05
CREDIT_WINDOW = 16
"""Tokens of credit at coordinators whose streams pause: see `held_back`."""
HOLD_OFF_MS = 200
"""Milliseconds that targets wait for their draft, enough on a busy machine."""
PROMPT = "def read_all(path):\n    with open(path) as file:\n"


def make_request(
    *, max_tokens: int = 200, temperature: float = 0.0, seed: int = 7, prompt: str = PROMPT, **sampling: Any
) -> api.GenerateRequest:
    """A request that decodes to max_tokens."""
    body = api.GenerateRequest(prompt=prompt)
    body.sampling.MergeFrom(api.SamplingParams(ignore_eos=True, **sampling))
    body.sampling.max_tokens, body.sampling.temperature, body.sampling.seed = max_tokens, temperature, seed
    return body


def sampled_request(seed: int, prompt: Sequence[int] | None = None, max_tokens: int = 300) -> api.GenerateRequest:
    """A request at temperature 1 that decodes to max_tokens; each seed has a prompt of its own, unless one is given."""
    message = api.GenerateRequest()
    message.prompt_token_ids.token_ids.extend(prompt or [10 + (seed * 7 + i * 3) % 200 for i in range(48)])
    message.sampling.temperature = 1.0
    message.sampling.seed = seed
    message.sampling.max_tokens = max_tokens
    message.sampling.ignore_eos = True
    return message


def story(max_tokens: int = 32) -> api.GenerateRequest:
    """A request at the default temperature that decodes to max_tokens."""
    request = api.GenerateRequest(prompt="Once upon a time")
    request.sampling.max_tokens = max_tokens
    request.sampling.seed = 7
    request.sampling.ignore_eos = True
    request.speculation.enabled = True
    return request


def plain(body: api.GenerateRequest) -> api.GenerateRequest:
    """The same request without speculation."""
    copy = api.GenerateRequest()
    copy.CopyFrom(body)
    copy.speculation.enabled = False
    return copy


async def eventually(condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Wait until a condition holds."""
    ends_s = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < ends_s, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(POLL_S)


@dataclass(frozen=True, kw_only=True)
class SmallBuffers(ClientSettings):
    """Settings of a client whose connection buffers few unread bytes."""

    def channel_options(self) -> list[tuple[str, str | int]]:
        return [*super().channel_options(), ("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]


def held_back(address: str) -> Client:
    """A client whose streams pause while they are not read, for as long as a busy machine needs.

    At a coordinator with `CREDIT_WINDOW` a stream is then at most a hundred tokens ahead of its reader. The keepalive
    timeout is long, because on a busy machine answers to pings have exceeded the default.
    """
    return Client(address, SmallBuffers(keepalive_timeout_s=20.0))


async def speculated(client: Client, body: api.GenerateRequest) -> Completion:
    """Repeat a request until each choice of the answer has accepted draft tokens; returns that answer.

    On a busy machine a draft may be too late for a whole short stream.
    """
    completions: list[Completion] = []

    async def has_part() -> bool:
        completions[:] = [await client.complete(body)]
        finished = [choice.finished for choice in completions[0].choices.values()]
        return all(end is not None and end.stats.num_accepted > 0 for end in finished)

    await eventually(has_part, "the draft has a part in the answer")
    return completions[0]


class Reading:
    """A stream that a test reads step by step. The end of the context cancels the rest."""

    def __init__(self, client: Client, body: api.GenerateRequest) -> None:
        self.chunks = client.generate(body)
        self.completion = Completion()

    async def __aenter__(self) -> Reading:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.chunks.aclose()  # type: ignore[attr-defined]

    async def until(self, num_tokens: int) -> Completion:
        """Read until the stream has `num_tokens` tokens."""
        while self.completion.num_tokens < num_tokens:
            self.completion.add(await anext(self.chunks))
        return self.completion

    async def rest(self) -> Completion:
        """Read to the end."""
        async for chunk in self.chunks:
            self.completion.add(chunk)
        return self.completion


def resumed(body: api.GenerateRequest, held: Completion) -> api.GenerateRequest:
    """The request that resumes a stream after `held`."""
    assert held.started is not None
    again = api.GenerateRequest()
    again.CopyFrom(body)
    again.request_id, again.sampling.seed = held.started.request_id, held.started.seed
    again.resume.resume_token = held.started.resume_token
    for index, choice in held.choices.items():
        offset = len(choice.text.encode())
        again.resume.choices.add(index=index, token_ids=choice.token_ids, text_offset_bytes=offset)
    return again


def start_again(cluster: Cluster, *names: str) -> None:
    """Restart ended services on their ports, all at once; returns when they are healthy."""
    for name in names:
        cluster.services[name].start()
    for name in names:
        cluster.wait_healthy(name)


def freeze(cluster: Cluster, name: str) -> None:
    """Freeze a service and its engine, with their connections open."""
    _signal_group(cluster, name, signal.SIGSTOP)


def thaw(cluster: Cluster, name: str) -> None:
    """End a freeze; does nothing to a service that is not frozen or has ended."""
    _signal_group(cluster, name, signal.SIGCONT)


def _signal_group(cluster: Cluster, name: str, number: int) -> None:
    service = cluster.services[name]
    if service.is_running and service.pid is not None:
        with suppress(ProcessLookupError):
            os.killpg(service.pid, number)


@contextmanager
def another(role: str, log_dir: Path, *, build: Build | None = None, **settings: object) -> Iterator[Cluster]:
    """Run one more service beside a cluster, healthy at entry; of this version unless a build is given."""
    defaults: dict[str, object] = {"metrics_port": None, "log_format": "console", "drain_s": 60.0}
    if role != "coordinator":
        defaults |= {"device": "cpu", "num_threads": 1}
    spec = service_spec(role, role, free_port(), RoleSettings(defaults=defaults, overrides=settings), environment={})
    if build is not None:
        spec = replace(spec, environment={**spec.environment, **build.environment})
    with Cluster([spec], log_dir=log_dir, timeouts=TIMEOUTS) as cluster:
        cluster.services[role].start()
        cluster.wait_healthy(role)
        yield cluster


def addresses_of(cluster: Cluster) -> dict[str, list[str]]:
    """Settings of a coordinator with the replicas of a cluster."""
    return {
        f"{role}s": [s.spec.address for s in cluster.services.values() if s.spec.role == role]
        for role in ("target", "draft")
    }


async def load_of(role: str, address: str) -> pb.LoadReport:
    """Present load of a replica, by a stream of its own: a periodic report may be older than the last request."""
    is_target = role == "target"
    async with grpc.aio.insecure_channel(address) as channel:
        attach = pb.Attach(owner_id="load-of", lease_generation=1)
        if is_target:
            call = target_pb2_grpc.TargetServiceStub(channel).Verify()
            await call.write(target_pb2.VerifyRequest(attach=attach))
        else:
            call = draft_pb2_grpc.DraftServiceStub(channel).Draft()
            await call.write(draft_pb2.DraftRequest(attach=attach))
        response = await call.read()
        call.cancel()
        return response.load


async def all_blocks_free(cluster: Cluster) -> None:
    """Wait until no replica holds a KV block."""
    for name in ("target", "draft"):
        address = cluster.services[name].spec.address

        async def is_free(name: str = name, address: str = address) -> bool:
            load = await load_of(name, address)
            return load.kv_blocks_used == load.num_running == load.num_waiting == 0

        await eventually(is_free, f"all KV blocks of the {name} are free")


def scrape(port: int) -> dict[str, float]:
    """Samples of a /metrics page: sums over the labels by name, and single ones by name{label=value}."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as page:
        text = page.read().decode()
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
            if labels:
                samples[f"{sample.name}{{{labels}}}"] = sample.value
    return samples


async def target_in_use(cluster: Cluster) -> str:
    """Name of the target that has the one session."""
    names: list[str] = []

    async def is_known() -> bool:
        names[:] = [
            name
            for name, service in cluster.services.items()
            if service.spec.role == "target" and (await load_of("target", service.spec.address)).kv_blocks_used
        ]
        return len(names) == 1

    await eventually(is_known, "one target has the session")
    return names[0]
