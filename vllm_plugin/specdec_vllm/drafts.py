"""The drafts, found by address or DNS, and the thread that owns their streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable

from specdec.wire.channel import ReplicaChannel
from specdec.wire.discovery import Discovery, ReplicaAddress
from specdec.wire.tls import replica_tls_files
from specdec.wire.tls_files import TlsFilesBroken
from specdec_vllm.draft_stream import DraftStream
from specdec_vllm.rows import RowSession, RowSessions
from specdec_vllm.settings import Engine, PluginSettings, WrongSettings

_TICK_S = 0.25
"""Seconds between checks for stuck drafts and rows that are gone."""
_GONE_S = 2.0
"""Seconds of steps without a row after which its session ends. A preempted request that comes back is opened again, and
finds its prefix in the draft's cache."""
_IDLE_S = 30.0
"""Seconds without any step after which all sessions end."""
_START_S = 10.0
"""Seconds for the thread to start."""
_log = logging.getLogger("vllm.specdec")


class Drafts:
    """All drafts. vLLM's thread holds `lock` while it works on sessions; so does the loop's while it takes results."""

    def __init__(self, settings: PluginSettings, engine: Engine) -> None:
        """Start the thread; returns before any draft is connected. Raises WrongSettings."""
        self._settings = settings
        try:
            self._tls = replica_tls_files(settings)
        except TlsFilesBroken as error:
            raise WrongSettings(f"specdec-vllm: {error}") from error
        self._engine = engine
        self._owner_id = f"vllm-{socket.gethostname()}-{secrets.token_hex(4)}"
        self.lock = threading.Condition(threading.RLock())
        self.sessions = RowSessions(self._owner_id)
        self.last_step_s = time.monotonic()
        self.streams: dict[str, DraftStream] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._main: asyncio.Task[None] | None = None
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="specdec-drafts", daemon=True)
        self._thread.start()
        started.wait(_START_S)

    def place(self, session: RowSession, now_s: float, dirty: set[DraftStream]) -> None:
        """Tell a session's home its new tokens, or find it a home. `dirty` gets the drafts with queued entries."""
        home = session.home
        if home is not None:
            if session.told < session.num_tokens:
                home.commit(session, now_s)
                dirty.add(home)
        elif now_s >= session.not_before_s:
            fitting = [stream for stream in self.streams.values() if stream.fits(session.num_tokens)]
            if not fitting:
                return
            home = min(fitting, key=lambda stream: len(stream.sessions))
            if home.open(session, now_s):
                dirty.add(home)
            else:
                session.not_before_s = now_s + _IDLE_S

    def flush(self, dirty: Iterable[DraftStream]) -> None:
        """Let the thread send what is queued."""
        for stream in dirty:
            self._call(stream.flush)

    def close(self) -> None:
        """End all streams and the thread."""
        main = self._main
        if main is not None:
            self._call(main.cancel)
        self._thread.join(_START_S)

    def _call(self, work: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(work)

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._main = self._loop.create_task(self._keep())
        started.set()
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._main)
        # The loop stays open: gRPC hands it late events, from other loops of the process as well.

    async def _keep(self) -> None:
        discovery = Discovery(self._settings.drafts)
        next_lookup_s = 0.0
        try:
            while True:
                try:
                    if time.monotonic() >= next_lookup_s:
                        next_lookup_s = time.monotonic() + self._settings.lookup_interval_s
                        self._set(await discovery.refresh())
                    self._tick()
                except Exception:
                    _log.exception("the plugin's thread had a fault; it goes on")
                await asyncio.sleep(_TICK_S)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _set(self, addresses: list[ReplicaAddress]) -> None:
        wanted = {one.address: one for one in addresses}
        with self.lock:
            for address in self.streams.keys() - wanted.keys():
                self._tasks.pop(address).cancel()
                for session in list(self.streams.pop(address).sessions.values()):
                    session.leave()
                self.lock.notify_all()
            for address in wanted.keys() - self.streams.keys():
                self.streams[address] = stream = self._stream(wanted[address])
                self._tasks[address] = asyncio.create_task(stream.run())

    def _stream(self, found: ReplicaAddress) -> DraftStream:
        settings = self._settings
        if found.server_name and not settings.replica_tls_server_name:
            settings = settings.model_copy(update={"replica_tls_server_name": found.server_name})
        channel = ReplicaChannel(found.address, settings, self._tls)
        return DraftStream(found.address, channel, settings, self._engine, owner_id=self._owner_id, lock=self.lock)

    def _tick(self) -> None:
        now_s = time.monotonic()
        dirty: set[DraftStream] = set()
        with self.lock:
            for session in list(self.sessions):
                is_gone = self.last_step_s - session.seen_s > _GONE_S or now_s - session.seen_s > _IDLE_S
                if is_gone:
                    if session.home is not None:
                        dirty.add(session.home)
                        session.home.close(session, "finished")
                    self.sessions.drop(session)
            stuck = [stream for stream in self.streams.values() if stream.is_stuck]
        for stream in dirty:
            stream.flush()
        for stream in stuck:
            stream.reset(f"no answer for {self._settings.stall_s:g} s")
