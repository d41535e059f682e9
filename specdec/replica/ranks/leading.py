"""The other ranks of an engine process, as rank 0 sees them: started, awaited, watched and stopped.

A lost rank leaves the others waiting in a collective, perhaps for ever. So a thread of rank 0 watches them: if one is
lost, it logs which, interrupts the engine's loop with ``RankLost``, and ends the process if the loop does not return
from its wait. If rank 0 dies, the kernel kills the other ranks of its machine; other nodes see their connections end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import structlog

from specdec.config import DraftSettings, TargetSettings
from specdec.config.nodes import NodeSettings, nodes_of
from specdec.engine.errors import EngineError
from specdec.engine.model.loader import check_tensor_parallel
from specdec.engine.parallel.frames import BadFrame, StepFrame, StepKind, text_frame
from specdec.engine.parallel.rank_group import RankGroup, device_of_rank, leaders_store, local_store
from specdec.engine.settings import EngineSettings
from specdec.replica.bridge.pulse import Pulse
from specdec.replica.ranks.gate import NodeGate
from specdec.replica.ranks.messages import Loaded, Refused, hello_of, receive
from specdec.replica.ranks.processes import RankProcesses, share_cores
from specdec.replica.ranks.rank_child import RankInstructions, store_path
from specdec.replica.ranks.watch import GroupWatch, RankLost
from specdec.telemetry.logs.writer import flush_logs

_STOP_S = 2.0
_NOTICE_S = 1.0  # seconds until a death is noticed after a collective has failed because of it
_REPORT_S = 5.0  # seconds for the engine's loop to report a lost rank before the process ends
_SHARE_OF_LOADING = 0.9
"""Share of load_timeout_s, from this process's start on, after which nodes are no longer awaited: the reason is told
before the time ends the start."""


class Ranks:
    """Ranks 1 and up. Made by ``lead_ranks``, used from the main thread."""

    def __init__(
        self,
        settings: EngineSettings,
        first_device: str,
        nodes: NodeSettings,
        service: tuple[str, str, str],
        report: Callable[[str], None],
        pulse: Pulse,
    ) -> None:
        """``service``: name, level and format for logs. ``report`` is called with the reason, in another thread, if the
        engine's loop hangs. ``pulse`` gets the ranks' marks.
        """
        self.settings = settings
        self.connections: list[socket.socket] = []
        """Sockets to ranks 1, 2, ...; sends time out after ``collective_timeout_s``."""
        self._first_device = first_device
        self._nodes = nodes
        self._service = service
        self._report = report
        self.pulse = pulse
        pulse.expect_ranks(settings.tensor_parallel_size)
        self._num_local = settings.tensor_parallel_size // nodes.nnodes
        self._remote: list[socket.socket] = []
        self._processes = RankProcesses()
        self._watch = GroupWatch(settings.collective_timeout_s, nodes.node_timeout_s, pulse)
        self._watching = threading.Thread(
            target=self._watch_all, args=(threading.get_ident(),), name="ranks", daemon=True
        )
        self._gate: NodeGate | None = None
        self._store_fd: int | None = None
        self._lost = threading.Event()
        self._lost_reason = ""
        self._is_stopping = False

    def start(self, wait_s: float) -> None:
        """Start this machine's ranks and wait for those of other nodes. Pins the former, also this one, to equal shares
        of this process's cores.

        Raises:
            EngineError: a node did not come within ``wait_s``, or the port cannot be used.
        """
        signal.signal(signal.SIGUSR1, self._raise_lost)
        store_port = 0
        if self._nodes.nnodes == 1:
            self._store_fd = os.memfd_create("specdec-ranks")  # it leaves no file behind
            self._store = local_store(store_path(self._store_fd), self.settings.tensor_parallel_size)
        else:
            store = leaders_store()
            self._store, store_port = store, store.port
        shares = share_cores(sorted(os.sched_getaffinity(0)), self._num_local)
        if self._nodes.nnodes > 1:
            self._await_nodes(store_port, wait_s)
        for rank in range(1, self._num_local):
            self._start_rank(rank, None if shares is None else list(shares[rank]), store_port)
        self.connections += self._remote
        if shares is not None:
            os.sched_setaffinity(0, shares[0])
        if self._watching.ident is None:  # not started for nodes
            self._watching.start()

    def join(self) -> RankGroup:
        """Join the other ranks; returns this rank's group once all have joined."""
        device = device_of_rank(self._first_device, 0)
        settings = self.settings
        return RankGroup.join(0, settings.tensor_parallel_size, device, self._store, settings.collective_timeout_s)

    def confirm(self, numerics_id: str) -> None:
        """Wait until the ranks of other nodes have loaded, and tell the nodes. Raises EngineError if one computes
        differently, which the nodes are told, too.
        """
        for rank, connection in enumerate(self._remote, start=self._num_local):
            try:
                loaded = receive(connection, StepKind.LOADED, Loaded)
            except (BadFrame, Refused) as error:
                raise EngineError(f"rank {rank} is no rank of this version: {error}") from error
            if loaded.numerics_id != numerics_id:
                reason = (
                    f"nnodes: rank {rank} computes as {loaded.numerics_id} and the leader as {numerics_id}; "
                    "all nodes need the same kind of processor or GPU and the same packages"
                )
                self._watch.tell(text_frame(StepKind.REFUSED, reason))
                raise EngineError(reason)
        if self._remote:
            self._watch.tell(text_frame(StepKind.READY))

    def check_cause(self, error: Exception) -> None:
        """Raise ``RankLost`` from an error, perhaps of a collective, if a rank is lost now or within a second."""
        if self._lost.wait(_NOTICE_S):
            raise RankLost(self._lost_reason) from error

    def stop(self) -> None:
        """Tell the ranks to stop, wait two seconds for those of this machine, and kill the rest."""
        self._is_stopping = True
        self._watch.stop()
        if self._gate is not None:
            self._gate.close()
        stop = StepFrame(StepKind.STOP, (), bytearray()).encode()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.settimeout(0)  # a rank that does not read is killed below
                connection.sendall(stop)
        self._processes.stop(0.0 if self._lost.is_set() else _STOP_S)
        for connection in self.connections:
            connection.close()
        if self._watching.ident is not None and not self._lost.is_set():  # it was started
            self._watching.join()
            self._watch.close()
        if self._store_fd is not None:
            os.close(self._store_fd)

    def _await_nodes(self, store_port: int, wait_s: float) -> None:
        hello = hello_of(self._nodes, self.settings)
        timeout_s = self.settings.collective_timeout_s
        add_node = self._watch.add_node
        self._gate = NodeGate(self._nodes, hello, store_port, self._num_local, timeout_s, add_node)
        self._watching.start()
        self._remote = self._gate.wait(wait_s)
        self._gate.close()

    def _start_rank(self, rank: int, cores: list[int] | None, store_port: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.settimeout(self.settings.collective_timeout_s)
        self.connections.append(ours)
        name, log_level, log_format = self._service
        with theirs:
            instructions: RankInstructions = {
                "rank": rank,
                "local_rank": rank,
                "settings": self.settings.model_dump_json(),
                "first_device": self._first_device,
                "store_fd": self._store_fd,
                "store": ("localhost", store_port),
                "socket_fd": theirs.fileno(),
                "leader": None,
                "pulse_fd": self.pulse.fd,
                "parent_pid": os.getpid(),
                "cores": cores,
                "service": f"{name}-rank-{rank}",
                "log_level": log_level,
                "log_format": log_format,
            }
            process = self._processes.start(instructions)
        self._watch.add_process(rank, process)

    def _watch_all(self, main_thread: int) -> None:
        lost = self._watch.run()
        if lost is None:
            return
        self._lost_reason = lost.reason
        self._lost.set()
        log = structlog.get_logger(__name__)
        log.error("rank_lost", reason=lost.reason, **lost.fields)
        signal.pthread_kill(main_thread, signal.SIGUSR1)
        threading.Event().wait(_REPORT_S)
        log.error("engine_stuck", reason=f"the loop still waits for other ranks after {self._lost_reason}")
        self._report(f"{RankLost.__name__}: {self._lost_reason}")
        flush_logs()
        os._exit(1)  # the kernel kills the other ranks of this machine

    def _raise_lost(self, _number: int, _frame: FrameType | None) -> None:
        if not self._is_stopping and self._lost.is_set():
            raise RankLost(self._lost_reason)


@contextlib.contextmanager
def lead_ranks(
    settings: TargetSettings | DraftSettings, service: str, report: Callable[[str], None], pulse: Pulse
) -> Iterator[Ranks | None]:
    """Ranks for an engine process that is rank 0, stopped at the end; None if the settings want one rank only.

    An error that a lost rank has caused leaves as ``RankLost``. If the engine's thread hangs in a collective, another
    thread calls ``report`` with the reason, and ends the process; in a captured step, which no rank's timeout ends, the
    servicer does by ``pulse``.

    Raises:
        TensorParallelRefused: the model or the machine does not allow this number of ranks.
        EngineError: other nodes did not come.
    """
    if settings.tensor_parallel_size == 1:
        yield None
        return
    own = EngineSettings.model_validate(settings.model_dump(include=set(EngineSettings.model_fields)))
    nodes = nodes_of(settings)
    first_device = check_tensor_parallel(own, nodes.nnodes)
    ranks = Ranks(own, first_device, nodes, (service, settings.log_level, settings.log_format), report, pulse)
    try:
        try:
            ranks.start(_SHARE_OF_LOADING * settings.load_timeout_s - _age_s())
            yield ranks
        except (RuntimeError, OSError) as error:
            ranks.check_cause(error)
            raise
    finally:
        ranks.stop()


def _age_s() -> float:
    """Seconds since this process started, on a clock that nobody sets."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
