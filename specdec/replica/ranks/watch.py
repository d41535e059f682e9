"""Watches a node's rank processes and its connections to other nodes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specdec.engine.parallel.frames import BadFrame, LeaderGone, StepFrame, StepKind, receive_frame, text_frame
from specdec.replica.bridge.pulse import Pulse
from specdec.replica.ranks.messages import MOST_TEXT_BYTES, text_of
from specdec.replica.ranks.rank_child import EXIT_REFUSED

_TICK_S = 1.0
"""Seconds between two beats, and looks for stopped ranks; an end is noticed at once."""
_NOTICE_S = 3.0
"""Seconds for rank 0 to find, and report better, why the model is refused."""


class RankLost(BaseException):
    """A rank or a node is gone or stopped, and the others cannot go on.

    Raised at any point of the engine's thread. It is no Exception, so that the interrupted code does not catch it as
    its own.
    """


@dataclass(frozen=True, slots=True)
class Loss:
    """What was lost, and its fields for the log."""

    reason: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Peer:
    name: str
    connection: socket.socket
    silent_s: float = 0.0


class GroupWatch:
    """Runs in one thread, which alone uses the connections that are given to it."""

    def __init__(self, stopped_limit_s: float, silence_limit_s: float, pulse: Pulse | None = None) -> None:
        """Limits in seconds: of a rank that a signal has stopped, and of another node's silence. `pulse` has the marks
        of this node's ranks, which beats carry, and gets those of others."""
        self.silence_limit_s = silence_limit_s
        self._stopped_limit_s = stopped_limit_s
        self._pulse = pulse or Pulse()
        self._processes: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}  # by pidfd: rank, process
        self._peers: dict[int, _Peer] = {}
        self._stopped_s: dict[int, float] = {}
        self._waiting: deque[Callable[[], Loss | None]] = deque()
        self._poller = select.poll()
        # Open as long as this object: it may be woken after its end.
        self._wake_file = os.fdopen(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), "rb", buffering=0)
        self._wake_fd = self._wake_file.fileno()
        self._poller.register(self._wake_fd, select.POLLIN)
        self._is_stopping = False

    def add_process(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Watch a rank. Any thread may call it."""

        def add() -> None:
            pidfd = os.pidfd_open(process.pid)
            self._processes[pidfd] = (rank, process)
            self._poller.register(pidfd, select.POLLIN)

        self._hand_over(add)

    def add_node(self, name: str, connection: socket.socket) -> None:
        """Watch a node, and show it that this one lives. Any thread may call it."""

        def add() -> None:
            self._peers[connection.fileno()] = _Peer(name, connection)
            self._poller.register(connection, select.POLLIN)

        self._hand_over(add)

    def tell(self, frame: StepFrame) -> None:
        """Send a frame to all nodes. Any thread may call it."""
        self._hand_over(lambda: self._send(frame))

    def stop(self) -> None:
        """Let `run` return None. Any thread may call it."""
        self._is_stopping = True
        self._wake()

    def run(self, on_frame: Callable[[StepFrame], None] = lambda frame: None) -> Loss | None:
        """Wait for a loss; None after `stop`. `on_frame` gets the frames of nodes that are no beats."""
        looked_at_s = time.monotonic()
        while not self._is_stopping:
            for fd, _ in self._poller.poll(_TICK_S * 1000):
                loss = self._on_event(fd, on_frame)
                if self._is_stopping:
                    return None
                if loss is not None:
                    return loss
            if (elapsed_s := time.monotonic() - looked_at_s) >= _TICK_S:
                looked_at_s += elapsed_s
                # A longer gap is this process's own sleep.
                loss = self._look(min(elapsed_s, 2 * _TICK_S))
                if loss is not None and not self._is_stopping:
                    return loss
        return None

    def close(self) -> None:
        """Close the connections. After `run`."""
        while self._waiting:
            self._waiting.popleft()()
        for peer in self._peers.values():
            peer.connection.close()
        for pidfd in self._processes:
            os.close(pidfd)

    def say(self, kind: StepKind, text: str) -> None:
        """Send a last frame to all nodes, if it can be done at once. After `run`."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.connection.sendall(text_frame(kind, text).encode())

    def _hand_over(self, action: Callable[[], Loss | None]) -> None:
        self._waiting.append(action)
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _on_event(self, fd: int, on_frame: Callable[[StepFrame], None]) -> Loss | None:
        if fd in self._peers:
            return self._read(self._peers[fd], on_frame)
        if fd != self._wake_fd:
            return self._ended(*self._processes[fd])
        os.eventfd_read(fd)
        while self._waiting:
            if (loss := self._waiting.popleft()()) is not None:
                return loss
        return None

    def _read(self, peer: _Peer, on_frame: Callable[[StepFrame], None]) -> Loss | None:
        while True:
            try:
                frame = receive_frame(peer.connection, MOST_TEXT_BYTES)
            except (LeaderGone, ConnectionResetError):
                return Loss(f"{peer.name} closed its connection")
            except (OSError, BadFrame) as error:
                return Loss(f"{peer.name}: {error}")
            peer.silent_s = 0.0
            if frame.kind in (StepKind.LOST, StepKind.REFUSED):
                return Loss(f"{peer.name}: {text_of(frame)}")
            if frame.kind is not StepKind.BEAT:
                on_frame(frame)
            elif not self._take_marks(frame):
                return Loss(f"{peer.name}: a beat with marks of no rank")
            # TLS may have read more than one frame.
            if not getattr(peer.connection, "pending", int)():
                return None

    def _send(self, frame: StepFrame) -> Loss | None:
        data = frame.encode()
        for peer in self._peers.values():
            try:
                peer.connection.sendall(data)
            except OSError as error:
                return Loss(f"{peer.name} is not reached: {error}")
        return None

    def _look(self, elapsed_s: float) -> Loss | None:
        for pidfd, (rank, process) in self._processes.items():
            self._stopped_s[pidfd] = self._stopped_s.get(pidfd, 0.0) + elapsed_s if _is_stopped(pidfd) else 0.0
            if (stopped_s := self._stopped_s[pidfd]) >= self._stopped_limit_s:
                reason = f"rank {rank} has been stopped by a signal for {stopped_s:.0f} s"
                return Loss(reason, {"rank": rank, "pid": process.pid})
        for peer in self._peers.values():
            peer.silent_s += elapsed_s
            if peer.silent_s >= self.silence_limit_s:
                return Loss(f"{peer.name} has been silent for {peer.silent_s:.0f} s (node_timeout_s)")
        ranks, marks = [rank for rank, _ in self._processes.values()], self._pulse.marks
        return self._send(text_frame(StepKind.BEAT, " ".join(f"{rank}:{marks[rank]}" for rank in ranks)))

    def _take_marks(self, beat: StepFrame) -> bool:
        try:
            for text in beat.payload.decode().split():
                self._pulse.mark_rank(*map(int, text.split(":")))
        except (ValueError, IndexError, TypeError):
            return False
        return True

    def _ended(self, rank: int, process: subprocess.Popen[bytes]) -> Loss:
        code = process.wait()
        if code == EXIT_REFUSED:
            time.sleep(_NOTICE_S)
        return Loss(f"rank {rank} {_describe_exit(code)}", {"rank": rank, "pid": process.pid, "exit_code": code})


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
