"""Nodes to their leader and the leader to nodes, before the first step: frames and JSON with one thing wrong."""

from __future__ import annotations

import asyncio
import json
import queue
import random
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from typing import Any

from specdec.config.nodes import NodeSettings
from specdec.engine.parallel.frames import BadFrame, StepFrame, StepKind, receive_frame, text_frame
from specdec.replica.ranks.gate import NodeGate
from specdec.replica.ranks.messages import Hello, Loaded, Refused, Welcome, parsed, receive, send, text_of
from tests.fuzz.cases import Case, Link, Run
from tests.fuzz.json_values import spoilt_json
from tests.fuzz.judge import Complaints, require
from tests.fuzz.links.ranks import spoilt

_PATIENCE_S = 10.0
_MOST_SENT_BYTES = 1 << 20
_OURS = Hello(version="1.0", nnodes=3, settings={"dtype": "auto", "max_model_len": None}, weights_digest="ab")


def _changed(rng: random.Random, case: Case, kind: StepKind, message: dict[str, Any]) -> bytes:
    if rng.random() < 0.25:
        return spoilt(rng, case, text_frame(kind, json.dumps(message)))
    kind = kind if rng.random() < 0.9 else rng.choice(list(StepKind))
    case.what.append(kind.name)
    return case.sent(StepFrame(kind, (), bytearray(spoilt_json(rng, case, message))).encode())


@contextmanager
def _gate() -> Iterator[int]:
    """Port of a leader of three nodes with two ranks each."""
    welcomed: queue.Queue[socket.socket] = queue.Queue()
    settings = NodeSettings.model_validate({"host": "127.0.0.1", "nnodes": 3, "master_addr": "127.0.0.1"})
    settings = settings.model_copy(update={"master_port": 0})
    gate = NodeGate(settings, _OURS, 4321, 2, _PATIENCE_S, lambda name, connection: welcomed.put(connection))
    try:
        yield gate.port
    finally:
        gate.close()
        for connection in [*(one for one in gate._ranks.values() if one is not None), *_drained(welcomed)]:
            connection.close()


def _drained(waiting: queue.Queue[socket.socket]) -> Iterator[socket.socket]:
    with suppress(queue.Empty):
        while True:
            yield waiting.get_nowait()


def _call(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), _PATIENCE_S)
    connection.settimeout(_PATIENCE_S)
    return connection


def _hello(rng: random.Random) -> dict[str, Any]:
    """What a node says, or one of its ranks."""
    told = _OURS.model_dump() | {"node_rank": 1}
    return told if rng.random() < 0.6 else told | {"rank": 2, "token": "0" * 32}


def _try_leader(case: Case) -> None:
    with _gate() as port:
        with closing(_call(port)) as connection:
            with suppress(ConnectionError):  # it need not read what it refuses
                connection.sendall(_changed(case.rng, case, StepKind.HELLO, _hello(case.rng)))
            with suppress(OSError):  # one that was reset cannot be shut down
                connection.shutdown(socket.SHUT_WR)
            answer = None
            with suppress(ConnectionError):  # the end of the connection is an answer to what is no frame
                answer = receive_frame(connection)
            if answer is not None and answer.kind is not StepKind.WELCOME:
                require(answer.kind is StepKind.REFUSED and bool(text_of(answer)), f"the answer is {answer}")
        with closing(_call(port)) as connection:
            send(connection, StepKind.HELLO, _OURS.model_copy(update={"node_rank": 2}))
            try:
                receive(connection, StepKind.WELCOME, Welcome)
            except Refused as refusal:
                is_taken = (
                    answer is not None and answer.kind is StepKind.WELCOME and "has joined already" in str(refusal)
                )
                require(is_taken, f"a good node is refused: {refusal}")


def _try_node(case: Case) -> None:
    """What a node or the leader reads of the other is a message, a reason, or an error of its type."""
    rng = case.rng
    kind, model = rng.choice([(StepKind.WELCOME, Welcome), (StepKind.LOADED, Loaded)])
    good: dict[str, Any] = {"token": "0" * 32, "store_port": 4321} if model is Welcome else {"numerics_id": "n"}
    text = json.dumps(good)
    here, there = socket.socketpair()
    with closing(here), closing(there):
        there.settimeout(_PATIENCE_S)
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_SENT_BYTES)  # nobody reads yet
        here.sendall(_changed(rng, case, kind, good))
        here.shutdown(socket.SHUT_WR)
        with suppress(BadFrame, Refused, OSError):
            require(isinstance(receive(there, kind, model), model), "no message")
    require(bool(parsed(text_frame(kind, text), kind, model)), "a good message is none")


@asynccontextmanager
async def leader_opened(complaints: Complaints) -> AsyncIterator[Run]:
    """Each case has a leader of its own, since a place is taken once."""

    async def run(case: Case) -> None:
        await asyncio.to_thread(_try_leader, case)

    yield run


@asynccontextmanager
async def node_opened(complaints: Complaints) -> AsyncIterator[Run]:
    """The reading end of a node."""

    async def run(case: Case) -> None:
        _try_node(case)

    yield run


LEADER, NODE = Link("node-leader", leader_opened), Link("leader-node", node_opened)
