"""Clients: what each asks for, what it got, and what it should have got."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc

from specdec.client import Client, Completion, ResumePolicy, generate_resuming
from specdec.client.resuming import resumed_request
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import RequestExists, SpecdecError, Unavailable
from tests.protocol.simulation import model
from tests.protocol.simulation.channel import SimulatedChannel
from tests.protocol.simulation.network import Network
from tests.protocol.simulation.virtual_loop import Process

_POLICY = ResumePolicy(max_attempts=10_000, max_wait_s=0.5)
_AGAIN_S = 0.25


@dataclass(frozen=True, slots=True)
class Ask:
    """A request."""

    prompt: tuple[int, ...]
    seed: int
    temperature: float
    max_tokens: int
    num_choices: int = 1

    def expected(self, choice: int) -> tuple[int, ...]:
        """Its output."""
        return model.reference(self.prompt, self.seed, choice, self.temperature, self.max_tokens)

    def body(self, request_id: str) -> api.GenerateRequest:
        """As it is sent."""
        sampling = api.SamplingParams(
            seed=self.seed, temperature=self.temperature, max_tokens=self.max_tokens, n=self.num_choices
        )
        body = api.GenerateRequest(request_id=request_id, sampling=sampling)
        body.prompt_token_ids.token_ids.extend(self.prompt)
        return body


class SimulatedClient(Client):
    """The product's client on the simulated network; its calls take turns among the coordinators that are there."""

    def __init__(self, network: Network, addresses: list[str]) -> None:
        self._network = network
        self._addresses = addresses
        self._num_calls = 0
        super().__init__(addresses[0])

    def _open_channel(self) -> grpc.aio.Channel:
        channel: Any = SimulatedChannel(self._network, self._pick)
        return channel

    def _pick(self) -> str:
        self._num_calls += 1
        turns = [self._addresses[(self._num_calls + i) % len(self._addresses)] for i in range(len(self._addresses))]
        there = [a for a in turns if (server := self._network.servers.get(a)) is not None and server.is_listening]
        return (there or turns)[0]


@dataclass(slots=True, eq=False)
class Job:
    """A request, from when it is sent until it has ended, over all interruptions."""

    request_id: str
    ask: Ask
    pause_s: float
    """How long its reader takes for each chunk."""
    got: Completion = field(default_factory=Completion)
    error: SpecdecError | None = None
    is_over: bool = False
    was_aborted: bool = False
    is_superseded: bool = False
    """Another client has taken it up."""
    num_deaths: int = 0
    """Engines of targets that ended by themselves while it ran: see `Quarantine`."""
    num_losses: int = 0
    """Nodes and connections that were lost otherwise meanwhile."""
    client: ClientNode | None = None
    """Who runs it; None: nobody for now."""
    task: asyncio.Task[None] | None = None
    on_token: Callable[[Job], None] = lambda job: None

    @property
    def is_done(self) -> bool:
        """It got its last chunk."""
        return self.got.finished is not None

    @property
    def label(self) -> str:
        """For people."""
        held = {index: len(choice.tokens) for index, choice in self.got.choices.items()}
        return f"{self.request_id} with {held} of {self.ask}"

    async def run(self, client: Client) -> None:
        """Send it, and go on until it has ended, whatever is unavailable."""
        body = self.ask.body(self.request_id) if self.got.started is None else self._resumed()
        while not self.is_over:
            try:
                async with aclosing(generate_resuming(client, body, _POLICY)) as chunks:
                    async for chunk in chunks:
                        self._take(chunk)
                        if self.pause_s:
                            await asyncio.sleep(self.pause_s)
                self.is_over = True
            except (Unavailable, RequestExists):  # before its first chunk
                await asyncio.sleep(_AGAIN_S)
                body = body if self.got.started is None else self._resumed()
            except SpecdecError as error:
                self.error, self.is_over = error, True

    def _resumed(self) -> api.GenerateRequest:
        return resumed_request(self.ask.body(self.request_id), self.got)

    def _take(self, chunk: api.GenerateResponse) -> None:
        kind = chunk.WhichOneof("chunk")
        choice = chunk.choice_finished.index
        is_known = kind == "choice_finished" and choice in self.got.choices and self.got.choices[choice].finished
        if not is_known and not (kind == "started" and self.got.started is not None):
            self.got.add(chunk)
        self.on_token(self)


class ClientNode:
    """A client's program, with one request."""

    def __init__(self, network: Network, number: int, addresses: list[str]) -> None:
        self.name = f"client-{number}"
        self.network = network
        self.addresses = addresses
        self.process: Process | None = None

    def start(self, job: Job) -> None:
        """Begin, or take up, a request."""
        process = self.process = Process(self.network.loop, self.name)
        job.client = self

        async def run() -> None:
            async with SimulatedClient(self.network, self.addresses) as client:
                await job.run(client)

        job.task = process.start(run(), f"job {job.request_id}")

    def kill(self) -> None:
        """The client's machine is gone; what it had got it still has."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            self.network.died(process)
