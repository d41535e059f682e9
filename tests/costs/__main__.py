"""Write the table of what the worst request of each route and method costs: `python -m tests.costs`;
with beginnings of routes or methods: of those.

Each body has the largest size that is taken and something that grows in it. Its reading, checking and translating is
measured in a child process of its own, up to where the request would wait for its turn: tokenizing and decoding have
budgets of their own. Processor time is this machine's; memory counts what the body causes beside itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from google.protobuf.message import Message

from specdec.gateway.app import build_app
from specdec.gateway.service import Gateway
from specdec.gateway.settings import GatewaySettings
from specdec.wire.errors import SpecdecError
from specdec.wire.parsing.parts import MalformedFrame
from tests.support.cost import Spent
from tests.support.costly.bodies import Nobody, bodies, called
from tests.support.costly.methods import METHODS, check, messages

MESSAGE_BYTES = 16 * 2**20
MIB = 2**20
MOST_CPU_S = 20
FIELDS = (
    "prompt",
    "messages",
    "input",
    "tokens",
    "tools",
    "response_format",
    "structured_outputs",
    "bad_words",
    "stop",
)
FIELDS += ("logit_bias", "documents", "chat_template_kwargs", "system", "unknown")
"""Fields that may be large, and some that may not; tests look at all (`test_body_cost.py`)."""
_HEAD = "| route or method | shapes | event loop, most | processor, most | memory, most |\n|---|---|---|---|---|\n"


@dataclass(slots=True)
class Cost:
    """What one request took."""

    shape: str
    num_bytes: int
    loop_s: float
    """Processor seconds of the event loop's thread; over gRPC those of the longest turn, between which others run."""
    cpu_s: float
    """Processor seconds of the process."""
    peak_bytes: int
    """Memory at its highest, beyond that before the request, which has the bytes already."""


def in_child(measured: Callable[[], tuple[float, float, int]]) -> tuple[float, float, int]:
    """The result of a call in a forked process, whose memory nothing else has touched. One that takes `MOST_CPU_S` is
    killed, and has taken for ever."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
        with contextlib.suppress(BaseException):
            os.write(writer, json.dumps(measured()).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as told:
        data = told.read()
    os.waitpid(pid, 0)
    if not data:
        return math.inf, math.inf, 0
    loop_s, cpu_s, peak_bytes = json.loads(data)
    return loop_s, cpu_s, peak_bytes


def measure(turns: Generator[None, None, None]) -> tuple[float, float, int]:
    """Seconds of this thread in the longest turn, those of the process, and bytes at the peak."""
    begun, longest_s, is_over = Spent(), 0.0, False
    while not is_over:
        before_s = time.thread_time()
        try:
            next(turns)
        except (StopIteration, SpecdecError, MalformedFrame):
            is_over = True
        longest_s = max(longest_s, time.thread_time() - before_s)
    _, cpu_s, peak_bytes = begun.until_now()
    return longest_s, cpu_s, peak_bytes


def measured_twice(kind: type[Message], data: bytes) -> tuple[float, float, int]:
    """`measure` of a check: memory of the first, and the shorter times, for the first finds nothing in caches."""
    first, second = measure(check(kind, data)), measure(check(kind, data))
    return min(first[0], second[0]), min(first[1], second[1]), first[2]


def of_gateway(wanted: tuple[str, ...]) -> Iterator[tuple[str, Cost]]:
    """Routes and costs of their bodies."""
    app = asyncio.run(_app())

    async def once(path: str, body: bytes) -> tuple[float, float, int]:
        await called(app, "/tokenize", b"{}")
        spent = Spent()
        await called(app, path, body)
        return spent.until_now()

    for route, shape, body in bodies(app.openapi(), scale=1, most_depth=1):
        if route.startswith(wanted) and (":" not in shape or shape.partition(":")[0] in FIELDS):

            def run(route: str = route, body: bytes = body) -> tuple[float, float, int]:
                return asyncio.run(once(route, body))

            yield f"POST {route}", Cost(shape, len(body), *in_child(run))


async def _app() -> Any:
    settings = GatewaySettings(coordinators=["localhost:1"], tool_parser="hermes", reasoning_parser="none")
    return build_app(replace(Gateway(settings).parts, coordinators=Nobody()))  # type: ignore[arg-type]


def of_methods(wanted: tuple[str, ...]) -> Iterator[tuple[str, Cost]]:
    """Methods over gRPC and costs of their messages."""
    for name, kind in METHODS.items():
        if not name.startswith(wanted):
            continue
        for shape, data in messages(kind, MESSAGE_BYTES):
            yield name, Cost(shape, len(data), *in_child(lambda kind=kind, data=data: measured_twice(kind, data)))


def main() -> None:
    """Print the worst of each route and method by processor time and by memory."""
    found: dict[str, list[Cost]] = {}
    wanted = tuple(sys.argv[1:]) or ("",)
    for where, cost in chain(of_gateway(wanted), of_methods(wanted)):
        found.setdefault(where, []).append(cost)
        sys.stderr.write(f"{where}: {cost.shape}: {cost.cpu_s:.2f} s, {cost.peak_bytes / MIB:.0f} MiB\n")
    sys.stdout.write(_HEAD)
    for where, costs in found.items():
        loop, cpu, memory = (max(costs, key=key) for key in (_loop, _cpu, _peak))
        cells = (
            f"`{where}`",
            str(len(costs)),
            f"{loop.loop_s * 1e3:.0f} ms ({loop.shape})",
            f"{cpu.cpu_s * 1e3:.0f} ms ({cpu.shape})",
            f"{memory.peak_bytes / MIB:.0f} MiB for {memory.num_bytes / MIB:.1f} ({memory.shape})",
        )
        sys.stdout.write(f"| {' | '.join(cells)} |\n")


def _loop(cost: Cost) -> float:
    return cost.loop_s


def _cpu(cost: Cost) -> float:
    return cost.cpu_s


def _peak(cost: Cost) -> float:
    return cost.peak_bytes


if __name__ == "__main__":
    main()
