"""A node that follows: its ranks work for an engine on another machine, the leader's."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import threading
import time
from collections.abc import Sequence

import grpc
import structlog
from prometheus_client import CollectorRegistry

from specdec.config import TargetSettings
from specdec.config.nodes import nodes_of
from specdec.engine.checkpoints.files import pinned
from specdec.engine.errors import EngineError
from specdec.engine.parallel.frames import BadFrame, StepFrame, StepKind
from specdec.engine.settings import EngineSettings
from specdec.replica.bridge.pulse import Pulse, new_pulse_file
from specdec.replica.ranks.connections import NodeConnections, outlast, talk_over_interface_of
from specdec.replica.ranks.messages import Hello, Refused, Welcome, hello_of, receive, send
from specdec.replica.ranks.processes import RankProcesses, share_cores
from specdec.replica.ranks.watch import GroupWatch
from specdec.service.process import split_cores
from specdec.service.server import run_service
from specdec.telemetry import BuildInfo, setup_logging
from specdec.wire.backoff import Backoff
from specdec.wire.tls_files import TlsFilesBroken

_RETRY = Backoff(0.5, 5.0)
_REPORT_S = 10.0
_END_S = 5.0
"""Seconds for the node's thread to end."""
_log = structlog.get_logger(__name__)


class NodeService:
    """Starts a node's ranks and keeps them as long as the leader lives; a specdec.service.server.Service.

    Its port has no methods but health, which is SERVING while the group is complete.
    """

    def __init__(self, name: str, grpc_name: str, settings: TargetSettings) -> None:
        self.name = name
        self.grpc_names: Sequence[str] = (grpc_name,)
        self._settings = settings
        self._nodes = nodes_of(settings)
        self._engine = EngineSettings.model_validate(settings.model_dump(include=set(EngineSettings.model_fields)))
        self._num_ranks = settings.tensor_parallel_size // settings.nnodes
        self._pulse = Pulse(new_pulse_file())
        self._watch = GroupWatch(settings.collective_timeout_s, math.inf, self._pulse)
        self._processes = RankProcesses()
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._failed: asyncio.Future[str] = self._loop.create_future()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="node", daemon=True)

    def register(self, server: grpc.aio.Server) -> None:
        """Add no handlers: only the leader is called."""

    async def start(self) -> None:
        """Join the group, and wait until all its ranks have loaded."""
        self._thread.start()
        await self._ready.wait()

    async def wait_failed(self) -> str:
        """Wait until the node has lost its leader or a rank; returns the reason."""
        return await asyncio.shield(self._failed)

    async def drain(self, timeout_s: float) -> None:
        """Wait for the leader to end: it may have to drain at the same time, and needs this node until then."""
        if self._ready.is_set():
            await asyncio.wait({self._failed}, timeout=timeout_s)

    async def stop(self) -> None:
        """End the ranks."""
        self._stopping.set()
        self._watch.stop()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, _END_S)

    def _work(self) -> None:
        try:
            reason = self._follow()
        except (EngineError, Refused, TlsFilesBroken, ValueError) as error:
            reason = str(error)
        except Exception as error:
            _log.exception("node_failed")
            reason = f"{type(error).__name__}: {error}"
        finally:
            self._processes.stop(0.0)  # before this thread ends, as they end with it
            self._watch.close()
        self._loop.call_soon_threadsafe(self._end, reason)

    def _end(self, reason: str) -> None:
        if not self._failed.done():
            self._failed.set_result(reason)

    def _follow(self) -> str:
        """Work until something is lost; returns the reason. Raises Refused and EngineError."""
        self._engine = pinned(self._engine)
        hello = hello_of(self._nodes, self._engine)
        joined = self._join(hello)
        if joined is None:
            return "the node is stopping"
        connection, welcome = joined
        host = connection.getpeername()[0]
        talk_over_interface_of(connection)
        limit_s = self._settings.node_timeout_s
        outlast(connection, limit_s, limit_s)
        _log.info("group_joined", node=hello.node_rank, leader=host)
        self._watch.add_node("the leader", connection)
        self._start_ranks(hello, host, welcome)

        def on_frame(frame: StepFrame) -> None:
            if frame.kind is StepKind.READY:
                self._watch.silence_limit_s = limit_s  # not before: a leader that loads may be busy for long
                self._loop.call_soon_threadsafe(self._ready.set)

        lost = self._watch.run(on_frame)
        if lost is None:
            self._watch.say(StepKind.LOST, "it is stopping")
            return "the node is stopping"
        if lost.fields.get("exit_code") == 0:  # a rank ends so when the leader does
            return "the leader has ended"
        self._watch.say(StepKind.LOST, lost.reason)
        return lost.reason

    def _join(self, hello: Hello) -> tuple[socket.socket, Welcome] | None:
        """Call the leader until it welcomes this node; None if the node is stopped before. Raises Refused, and
        EngineError after `load_timeout_s`.
        """
        connections = NodeConnections(self._nodes)
        host, port = self._nodes.master_addr or "", self._nodes.master_port
        began_s = reported_s = time.monotonic()
        attempt = 0
        while not self._stopping.is_set():
            attempt += 1
            try:
                connection = connections.call(host, port)
            except OSError as error:
                reason = str(error)
            else:
                try:
                    send(connection, StepKind.HELLO, hello)
                    return connection, receive(connection, StepKind.WELCOME, Welcome)
                except (OSError, BadFrame) as error:
                    reason = str(error)
                    connection.close()
                except BaseException:
                    connection.close()
                    raise
            now_s = time.monotonic()
            if now_s >= began_s + self._settings.load_timeout_s:
                raise EngineError(f"master_addr: {host}:{port} did not let this node join: {reason}")
            if attempt == 1 or now_s >= reported_s + _REPORT_S:
                reported_s = now_s
                _log.warning("waiting_for_leader", leader=f"{host}:{port}", reason=reason)
            self._stopping.wait(_RETRY.wait_s(attempt))
        return None

    def _start_ranks(self, hello: Hello, host: str, welcome: Welcome) -> None:
        cores, _ = split_cores(self._settings.engine_cores, os.sched_getaffinity(0))
        shares = share_cores(sorted(cores or os.sched_getaffinity(0)), self._num_ranks)
        first = self._num_ranks * self._settings.node_rank
        for number in range(self._num_ranks):
            rank = first + number
            own = hello.model_copy(update={"rank": rank, "token": welcome.token})
            process = self._processes.start(
                {
                    "rank": rank,
                    "local_rank": number,
                    "settings": self._engine.model_dump_json(),
                    "first_device": "",
                    "store_fd": None,
                    "store": (host, welcome.store_port),
                    "socket_fd": None,
                    "pulse_fd": self._pulse.fd,
                    "leader": {
                        "nodes": self._nodes.model_dump_json(),
                        "hello": own.model_dump_json(),
                        "host": host,
                    },
                    "parent_pid": os.getpid(),
                    "cores": None if shares is None else list(shares[number]),
                    "service": f"{self.name}-rank-{rank}",
                    "log_level": self._settings.log_level,
                    "log_format": self._settings.log_format,
                }
            )
            self._watch.add_process(rank, process)


def run_node(name: str, grpc_name: str, settings: TargetSettings) -> int:
    """Run a node until a signal, or the end of its group; returns the exit code."""
    setup_logging(name, settings.log_level, settings.log_format)
    return asyncio.run(_run(name, grpc_name, settings))


async def _run(name: str, grpc_name: str, settings: TargetSettings) -> int:
    registry = CollectorRegistry()
    BuildInfo(registry, name)
    return await run_service(NodeService(name, grpc_name, settings), settings, registry=registry)
