"""The leader's port for other nodes and their ranks, open until all have come."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import structlog

from specdec.config.nodes import NodeSettings
from specdec.engine.errors import EngineError
from specdec.engine.parallel.frames import BadFrame, StepKind
from specdec.replica.ranks.connections import NodeConnections, PeerUnknown, outlast, talk_over_interface_of
from specdec.replica.ranks.messages import Hello, Refused, Welcome, difference, receive, send
from specdec.service.listening import bound_sockets
from specdec.wire.tls_files import TlsFilesBroken

_MOST_GREETINGS = 64
"""Connections that are being greeted at once; above it the oldest is closed, so that silent strangers block no node."""
_REPORT_S = 10.0
_LOG_S = 1.0
"""Seconds between two log lines about refused connections, of which a stranger can make any number."""
_log = structlog.get_logger(__name__)


class NodesMissing(EngineError):
    """Nodes did not come in time."""


class NodeGate:
    """Greets nodes and ranks in threads of its own."""

    def __init__(
        self,
        settings: NodeSettings,
        hello: Hello,
        store_port: int,
        ranks_per_node: int,
        step_timeout_s: float,
        on_node: Callable[[str, socket.socket], None],
    ) -> None:
        """Listen. Raises EngineError.

        Args:
            settings: the leader's.
            hello: what all nodes must be like.
            store_port: port of the ranks' store.
            ranks_per_node: ranks of each node.
            step_timeout_s: longest time for sending a step to a rank.
            on_node: called in another thread with the name and connection of each welcomed node.
        """
        self._settings = settings
        self._hello = hello
        self._welcome = Welcome(token=secrets.token_hex(16), store_port=store_port)
        self._ranks_per_node = ranks_per_node
        self._step_timeout_s = step_timeout_s
        self._on_node = on_node
        try:
            self._connections = NodeConnections(settings)
        except TlsFilesBroken as error:
            raise EngineError(str(error)) from error
        self._changed = threading.Condition()
        self._nodes: dict[int, str] = {}
        self._joined: set[int] = set()  # nodes whose connections `on_node` has
        self._ranks: dict[int, socket.socket | None] = {}  # None: being welcomed
        self._greetings: deque[socket.socket] = deque()
        self._last_refusal = ""
        self._logged_at_s = -_LOG_S
        self._num_unlogged = 0
        self._is_open = True
        try:
            self._listeners = bound_sockets(settings.host, settings.master_port, socket.SO_REUSEADDR)
            for listener in self._listeners:
                listener.listen(_MOST_GREETINGS)
        except OSError as error:
            raise EngineError(
                f"master_port: cannot listen on {settings.host}:{settings.master_port}: {error}"
            ) from error
        self.port: int = self._listeners[0].getsockname()[1]
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), name="node-gate", daemon=True).start()

    def wait(self, timeout_s: float) -> list[socket.socket]:
        """Wait for the other nodes and all their ranks; returns the ranks' connections in the order of ranks.

        Raises NodesMissing, which names them.
        """
        deadline_s = time.monotonic() + timeout_s
        report_at_s = time.monotonic() + _REPORT_S
        with self._changed:
            while self._lacking():
                now_s = time.monotonic()
                if now_s >= deadline_s:
                    raise NodesMissing(self._missing("within load_timeout_s"))
                if now_s >= report_at_s:
                    report_at_s += _REPORT_S
                    _log.warning("waiting_for_nodes", reason=self._missing("yet"), port=self.port)
                self._changed.wait(min(1.0, deadline_s - now_s))
            return [connection for _, connection in sorted(self._ranks.items()) if connection is not None]

    def close(self) -> None:
        """Let no other connection in."""
        self._is_open = False
        for listener in self._listeners:
            # Closing alone does not end a thread's call of accept.
            _shut(listener)
        with self._changed:
            for greeting in self._greetings:
                _shut(greeting)

    def _lacking(self) -> list[int]:
        """Nodes that have not joined, or not with all their ranks."""
        count = self._ranks_per_node

        def is_here(node: int) -> bool:
            ranks = range(node * count, (node + 1) * count)
            return node in self._joined and all(self._ranks.get(rank) is not None for rank in ranks)

        return [node for node in range(1, self._settings.nnodes) if not is_here(node)]

    def _missing(self, when: str) -> str:
        lacking = self._lacking()
        refusal = f"; the last refusal: {self._last_refusal}" if self._last_refusal else ""
        noun = "node" if len(lacking) == 1 else "nodes"
        return f"nnodes: {noun} {', '.join(map(str, lacking))} did not join {when}{refusal}"

    def _accept(self, listener: socket.socket) -> None:
        while self._is_open:
            try:
                connection, address = listener.accept()
            except OSError:
                if self._is_open:  # out of descriptors, or a connection that was reset
                    time.sleep(0.1)
                continue
            with self._changed:
                self._greetings.append(connection)
                if len(self._greetings) > _MOST_GREETINGS:
                    _shut(self._greetings.popleft())
            peer = address[0].removeprefix("::ffff:")
            threading.Thread(target=self._greet, args=(connection, peer), name="node-greeting", daemon=True).start()
        listener.close()

    def _greet(self, raw: socket.socket, peer: str) -> None:
        connection = raw
        try:
            connection = self._connections.answer(raw)
            try:
                self._connections.check_names(connection)
                hello = receive(connection, StepKind.HELLO, Hello)
                self._admit(hello, peer)
            except (Refused, BadFrame, PeerUnknown) as refusal:
                if isinstance(refusal, Refused):
                    self._last_refusal = str(refusal)
                send(connection, StepKind.REFUSED, str(refusal))
                raise
            self._take(hello, connection, peer)
        except (OSError, BadFrame, Refused) as error:
            connection.close()
            self._tell_refusal(peer, str(error) or repr(error))
        finally:
            with self._changed:
                if raw in self._greetings:
                    self._greetings.remove(raw)

    def _admit(self, hello: Hello, peer: str) -> None:
        """Reserve the place of a node or rank. Raises Refused."""
        if hello.rank is not None and not secrets.compare_digest(hello.token.encode(), self._welcome.token.encode()):
            raise Refused(f"rank {hello.rank} of node {hello.node_rank} belongs to another group")
        if (reason := difference(self._hello, hello)) is not None:
            raise Refused(reason)
        if not 0 < hello.node_rank < self._settings.nnodes:
            raise Refused(f"node_rank {hello.node_rank} is not between 1 and {self._settings.nnodes - 1}")
        with self._changed:
            if hello.rank is None:
                if hello.node_rank in self._nodes:
                    raise Refused(f"node {hello.node_rank} has joined already, from {self._nodes[hello.node_rank]}")
                self._nodes[hello.node_rank] = peer
                return
            if hello.rank // self._ranks_per_node != hello.node_rank or hello.rank in self._ranks:
                raise Refused(f"rank {hello.rank} is not one that node {hello.node_rank} has to bring")
            self._ranks[hello.rank] = None

    def _take(self, hello: Hello, connection: socket.socket, peer: str) -> None:
        try:
            send(connection, StepKind.WELCOME, self._welcome)
            talk_over_interface_of(connection)
        except OSError:
            with self._changed:
                if hello.rank is None:
                    del self._nodes[hello.node_rank]
                else:
                    del self._ranks[hello.rank]
            raise
        limit_s = self._settings.node_timeout_s
        if hello.rank is None:
            outlast(connection, limit_s, limit_s)
            _log.info("node_joined", node=hello.node_rank, peer=peer)
            self._on_node(f"node {hello.node_rank} ({peer})", connection)
        else:
            outlast(connection, limit_s, self._step_timeout_s)
        with self._changed:
            if hello.rank is None:
                self._joined.add(hello.node_rank)
            else:
                self._ranks[hello.rank] = connection
            self._changed.notify_all()

    def _tell_refusal(self, peer: str, reason: str) -> None:
        if not self._is_open:
            return
        with self._changed:
            self._num_unlogged += 1
            if time.monotonic() < self._logged_at_s + _LOG_S:
                return
            count, self._num_unlogged, self._logged_at_s = self._num_unlogged, 0, time.monotonic()
        _log.warning("node_refused", peer=peer, reason=reason[:300], refusals=count)


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        connection.close()
