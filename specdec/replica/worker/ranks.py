"""The following ranks of an engine process: started, watched and stopped by rank 0.

A lost rank leaves the others waiting in a collective, perhaps for ever. So a thread of rank 0 watches the processes: if
one ends, or stays stopped, it logs which, interrupts the engine's loop with ``RankLost``, and ends the process if the
loop does not return from its wait. If rank 0 dies, the kernel kills the other ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import structlog

from specdec.engine.model.loader import check_tensor_parallel
from specdec.engine.parallel.rank_group import RankGroup
from specdec.engine.parallel.step_frames import StepFrame, StepKind
from specdec.engine.settings import EngineSettings
from specdec.replica.worker.errors import RankLost
from specdec.replica.worker.rank_child import EXIT_REFUSED, RankInstructions, store_path
from specdec.telemetry.logs.writer import flush_logs

_STOP_S = 2.0
_NOTICE_S = 1.0  # seconds until a death is noticed after a collective has failed because of it
_STATE_CHECK_S = 1.0  # seconds between two looks for stopped ranks; an end is noticed at once
_REPORT_S = 5.0  # seconds for the engine's loop to report a lost rank before the process ends
_LAUNCHER_ONLY = ("PROMETHEUS_MULTIPROC_DIR",)  # metrics are rank 0's


class Ranks:
    """The processes of ranks 1 and up. Made by ``lead_ranks``, used from the main thread."""

    def __init__(
        self, settings: EngineSettings, first_device: str, store_fd: int, report: Callable[[str], None]
    ) -> None:
        """``report`` is called with the reason, in another thread, if the engine's loop hangs."""
        self.settings = settings
        self.connections: list[socket.socket] = []
        """Sockets to ranks 1, 2, ...; sends time out after ``collective_timeout_s``."""
        self._first_device = first_device
        self._store_fd = store_fd
        self._report = report
        self._processes: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}  # by pidfd: rank, process
        self._lost = threading.Event()
        self._lost_reason = ""
        self._is_stopping = False

    def start(self, service: str, log_level: str, log_format: str) -> None:
        """Start the ranks and pin all, also this one, to equal shares of this process's cores."""
        shares = share_cores(sorted(os.sched_getaffinity(0)), self.settings.tensor_parallel_size)
        for rank in range(1, self.settings.tensor_parallel_size):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            ours.settimeout(self.settings.collective_timeout_s)
            self.connections.append(ours)
            with theirs:
                instructions: RankInstructions = {
                    "rank": rank,
                    "settings": self.settings.model_dump_json(),
                    "first_device": self._first_device,
                    "store_fd": self._store_fd,
                    "socket_fd": theirs.fileno(),
                    "parent_pid": os.getpid(),
                    "cores": None if shares is None else list(shares[rank]),
                    "service": f"{service}-rank-{rank}",
                    "log_level": log_level,
                    "log_format": log_format,
                }
                process = _spawn(instructions)
            self._processes[os.pidfd_open(process.pid)] = (rank, process)
            structlog.get_logger(__name__).info("rank_started", rank=rank, pid=process.pid, cores=instructions["cores"])
        if shares is not None:
            os.sched_setaffinity(0, shares[0])
        signal.signal(signal.SIGUSR1, self._raise_lost)
        threading.Thread(target=self._watch, args=(threading.get_ident(),), name="ranks", daemon=True).start()

    def join(self) -> RankGroup:
        """Join the other ranks; returns this rank's group once all have joined."""
        store, settings = store_path(self._store_fd), self.settings
        return RankGroup.join(
            0, settings.tensor_parallel_size, self._first_device, store, settings.collective_timeout_s
        )

    def check(self, wait_s: float) -> None:
        """Raise ``RankLost`` if a rank is lost now or within ``wait_s``."""
        if self._lost.wait(wait_s):
            raise RankLost(self._lost_reason)

    def stop(self) -> None:
        """Tell the ranks to stop, wait two seconds for them, and kill the rest."""
        self._is_stopping = True
        stop = StepFrame(StepKind.STOP, (), bytearray()).encode()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.settimeout(0)  # a rank that does not read is killed below
                connection.sendall(stop)
        deadline_s = time.monotonic() + (0.0 if self._lost.is_set() else _STOP_S)
        for _, process in self._processes.values():
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for connection in self.connections:
            connection.close()

    def _watch(self, main_thread: int) -> None:
        lost = self._first_lost()
        if lost is None:
            return
        rank, process, what = lost
        self._lost_reason = f"rank {rank} {what}"
        self._lost.set()
        log = structlog.get_logger(__name__)
        log.error("rank_lost", rank=rank, pid=process.pid, exit_code=process.returncode, reason=self._lost_reason)
        signal.pthread_kill(main_thread, signal.SIGUSR1)
        threading.Event().wait(_REPORT_S)
        log.error("engine_stuck", reason=f"the loop still waits for other ranks after {self._lost_reason}")
        self._report(f"{RankLost.__name__}: {self._lost_reason}")
        flush_logs()
        os._exit(1)  # the kernel kills the other ranks

    def _first_lost(self) -> tuple[int, subprocess.Popen[bytes], str] | None:
        """Wait for a rank that ends or stays stopped; returns number, process and cause, or None after `stop`."""
        poller = select.poll()
        for pidfd in self._processes:
            poller.register(pidfd, select.POLLIN)
        stopped_since_s: dict[int, float] = {}
        while not (ended := poller.poll(_STATE_CHECK_S * 1000)):
            for pidfd, (rank, process) in self._processes.items():
                if not _is_stopped(pidfd):
                    stopped_since_s.pop(pidfd, None)
                    continue
                stopped_s = time.monotonic() - stopped_since_s.setdefault(pidfd, time.monotonic())
                if stopped_s >= self.settings.collective_timeout_s and not self._is_stopping:
                    return rank, process, f"has been stopped by a signal for {stopped_s:.0f} s"
        if self._is_stopping:
            return None
        rank, process = self._processes[ended[0][0]]
        code = process.wait()
        if code == EXIT_REFUSED:
            threading.Event().wait(_NOTICE_S)  # rank 0 finds the same cause, and reports it better
        return rank, process, _describe_exit(code)

    def _raise_lost(self, _number: int, _frame: FrameType | None) -> None:
        if not self._is_stopping and self._lost.is_set():
            raise RankLost(self._lost_reason)


@contextlib.contextmanager
def lead_ranks(
    settings: EngineSettings, service: str, log_level: str, log_format: str, report: Callable[[str], None]
) -> Iterator[Ranks | None]:
    """Ranks for an engine process that is rank 0, stopped at the end; None if the settings want one rank only.

    An error that a lost rank has caused leaves as ``RankLost``. If the engine's thread hangs in a collective, another
    thread calls ``report`` with the reason, and ends the process.

    Raises:
        TensorParallelRefused: the model or the machine does not allow this number of ranks.
    """
    if settings.tensor_parallel_size == 1:
        yield None
        return
    own = EngineSettings.model_validate(settings.model_dump(include=set(EngineSettings.model_fields)))
    first_device = check_tensor_parallel(own)
    store_fd = os.memfd_create("specdec-ranks")  # for the ranks' rendezvous; it leaves no file behind
    ranks = Ranks(own, first_device, store_fd, report)
    try:
        ranks.start(service, log_level, log_format)
        try:
            yield ranks
        except (RuntimeError, OSError) as error:
            if not isinstance(error, RankLost):
                _raise_if_lost(ranks, error)
            raise
    finally:
        ranks.stop()
        os.close(store_fd)


def share_cores(cores: Sequence[int], count: int) -> list[tuple[int, ...]] | None:
    """Divide cores into ``count`` runs of nearly equal length; None if there are fewer cores."""
    if len(cores) < count:
        return None
    bounds = [len(cores) * number // count for number in range(count + 1)]
    return [tuple(cores[low:high]) for low, high in itertools.pairwise(bounds)]


def _raise_if_lost(ranks: Ranks, error: Exception) -> None:
    try:
        ranks.check(_NOTICE_S)
    except RankLost as lost:
        raise lost from error


def _spawn(instructions: RankInstructions) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for name in _LAUNCHER_ONLY:
        environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-m", "specdec.replica.worker.rank_child"],
        stdin=subprocess.PIPE,
        pass_fds=[instructions["socket_fd"], instructions["store_fd"]],
        env=environment,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(json.dumps(instructions).encode())
    return process


def _is_stopped(pidfd: int) -> bool:
    """Whether a signal has stopped a child; a debugger does not count."""
    try:
        return os.waitid(os.P_PIDFD, pidfd, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # ended, and waited for by another thread
        return False


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    if code == EXIT_REFUSED:
        return "could not load the model: see its log"
    return f"exited with code {code}"
