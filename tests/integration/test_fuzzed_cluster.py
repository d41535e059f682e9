"""Real processes that are sent what no peer of ours would, at every port they have: they grow by nothing and go on."""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
import time
from collections.abc import Iterable
from typing import Any

import grpc
import psutil
import pytest
import typer
from google.protobuf.message import Message

from specdec.commands.up.cluster import Cluster
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import coordinator_pb2_grpc as api_grpc
from tests.fuzz.cases import Case
from tests.fuzz.judge import check_status, require
from tests.fuzz.links.client import Clients, conversations
from tests.fuzz.links.metrics import exchange, request
from tests.fuzz.links.worker import SIDES, changed
from tests.support.services.coordinator_harness import collect
from tests.support.services.faults import eventually, make_request

pytestmark = pytest.mark.timeout(900)

SEED = 20261122
NUM_CASES = 150
"""Some sixteen seconds, on two cores that others use, too."""
SECONDS = 180.0
NUM_WARM = 60
GOOD_EVERY = 10
READ_S = 0.2
"""How long a replica's answers to nonsense are listened to: it need not give any."""
MOST_S = 60.0
"""For one answer. A request may be changed into one for as many tokens as the context has room for."""
MOST_MORE_DESCRIPTORS = 16
MOST_MORE_RSS_BYTES = 96 * 2**20
"""Allocators keep what large messages took once; the prefix caches are full of what they have room for."""
PATHS = {"target": "/specdec.v1.TargetService/Verify", "draft": "/specdec.v1.DraftService/Draft"}
_FAULT = re.compile(r"Traceback|\[error |\[critical|internal_error")


class Fleet:
    """A cluster's ports, and what its processes hold."""

    def __init__(self, cluster: Cluster, metrics_ports: dict[str, int], channels: dict[str, grpc.aio.Channel]) -> None:
        self._cluster = cluster
        self._metrics_ports = metrics_ports
        self._channels = channels
        self._stub = api_grpc.CoordinatorServiceStub(channels["coordinator"])

    async def begin(self) -> None:
        """Learn what is right."""
        first = await collect(self._stub.Generate(make_request(max_tokens=12)))
        assert first.started is not None
        self._expected = first.ids()
        info = await self._stub.GetModelInfo(api.GetModelInfoRequest())
        self._clients = Clients(
            self._channels["coordinator"], _of_model(info.target.name, conversations(first.started)), MOST_S
        )

    async def check_good(self) -> None:
        """The next good request is answered exactly. Raises Fault."""
        async with asyncio.timeout(MOST_S):
            result = await collect(self._stub.Generate(make_request(max_tokens=12), wait_for_ready=True))
        require(result.ids() == self._expected, f"a good request got {result.ids()}")

    async def attack(self, case: Case) -> None:
        """Anything at any port. Raises Fault."""
        rng = case.rng
        role = rng.choice(["coordinator", "coordinator", "target", "draft"])
        if rng.random() < 0.25:
            data = request(rng)
            case.what.append(f"metrics of {role}: {data[:80]!r} of {len(data)} bytes")
            await asyncio.to_thread(exchange, self._metrics_ports[role], data)
        elif role == "coordinator":
            await self._clients.try_one(case)
        else:
            await self._stream(role, changed(case, SIDES[role].conversation(rng)))

    async def _stream(self, role: str, frames: Iterable[bytes]) -> None:
        open_stream: Any = self._channels[role].stream_stream(PATHS[role])
        call = open_stream()
        try:
            if await _written(call, frames):
                async with asyncio.timeout(READ_S):
                    while await call.read() is not grpc.aio.EOF:
                        pass
        except TimeoutError:
            pass
        except grpc.aio.AioRpcError as error:
            check_status(error.code(), error.trailing_metadata() or (), frozenset())  # type: ignore[arg-type]
        finally:
            call.cancel()

    def held(self) -> dict[str, tuple[int, int]]:
        """Descriptors and bytes of memory of each process, engines too."""
        found = {}
        for name, service in self._cluster.services.items():
            process = psutil.Process(service.pid)
            for number, each in enumerate([process, *process.children(recursive=True)]):
                found[f"{name}/{number}"] = (each.num_fds(), each.memory_info().rss)
        return found

    def logged(self) -> str:
        """All that they have logged."""
        return "".join(path.read_text(errors="replace") for path in sorted(self._cluster.log_dir.glob("*.log")))


async def _written(call: Any, frames: Iterable[bytes]) -> bool:
    """Whether all were written. Of a stream that ended meanwhile grpc.aio says INTERNAL, whatever it ended with."""
    try:
        for frame in frames:
            await call.write(frame)
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return False
    return True


def _of_model(name: str, valid: list[tuple[str, Message]]) -> list[tuple[str, Message]]:
    for _, message in valid:
        if getattr(message, "model", ""):
            message.model = name  # type: ignore[attr-defined]
    return valid


async def attack_all(cluster: Cluster, metrics_ports: dict[str, int], seed: int, numbers: Iterable[int]) -> None:
    """Run cases; raises AssertionError for what they did."""
    async with (
        grpc.aio.insecure_channel(cluster.address) as coordinator,
        grpc.aio.insecure_channel(cluster.services["target"].spec.address) as target,
        grpc.aio.insecure_channel(cluster.services["draft"].spec.address) as draft,
    ):
        fleet = Fleet(cluster, metrics_ports, {"coordinator": coordinator, "target": target, "draft": draft})
        await fleet.begin()
        num_logged, before = len(fleet.logged()), fleet.held()
        for number in numbers:
            case = Case("cluster", seed, number)
            try:
                await fleet.attack(case)
                if number % GOOD_EVERY == 0:
                    await fleet.check_good()
            except Exception as error:
                raise AssertionError(f"case {number} of seed {seed}, {'; '.join(case.what)}: {error!r}") from error
            if number == NUM_WARM:
                before = fleet.held()
        await fleet.check_good()

        async def is_flat() -> bool:
            after = fleet.held()
            return set(after) == set(before) and all(
                after[name][0] <= before[name][0] + MOST_MORE_DESCRIPTORS
                and after[name][1] <= before[name][1] + MOST_MORE_RSS_BYTES
                for name in after
            )

        await eventually(is_flat, f"what they hold is {before} again")
        assert not _FAULT.findall(fleet.logged()[num_logged:])


async def test_nothing_that_is_sent_to_any_port_is_anybody_elses_loss(
    tiny_cluster: Cluster, tiny_metrics_ports: dict[str, int]
) -> None:
    await attack_all(tiny_cluster, tiny_metrics_ports, SEED, range(NUM_CASES))


@pytest.mark.long
async def test_minutes_of_it_from_a_random_seed_change_nothing(
    tiny_cluster: Cluster, tiny_metrics_ports: dict[str, int]
) -> None:
    seed, until_s = secrets.randbits(32), time.monotonic() + SECONDS
    typer.echo(f"seed {seed}")
    numbers = itertools.takewhile(lambda _: time.monotonic() < until_s, itertools.count())
    await attack_all(tiny_cluster, tiny_metrics_ports, seed, numbers)
