"""Streams that a draft's engine opens to targets.

An address comes from a coordinator, by way of the engine. It is called only if the draft's own settings name it, so
that no coordinator can make a draft show its certificate elsewhere.
"""

from __future__ import annotations

import asyncio
import time

import grpc
import structlog

from specdec.config import DraftSettings
from specdec.replica.bridge.engine_process import EngineProcess
from specdec.replica.bridge.stream_relay import RelayedStream
from specdec.telemetry import RelayMetrics
from specdec.v1 import target_pb2
from specdec.wire.channel import ReplicaChannel
from specdec.wire.discovery import Discovery, ReplicaAddress
from specdec.wire.tls import replica_tls_files
from specdec.wire.tls_files import TlsFilesBroken

_METHOD = f"/{target_pb2.DESCRIPTOR.services_by_name['TargetService'].full_name}/Link"
_LOOK_UP_S = 5.0
"""Seconds between two look-ups of names, at least: an unknown address must cost the name server nothing."""
_log = structlog.get_logger(__name__)


class LinkDialer:
    """Calls targets for an engine. Use it from one event loop."""

    def __init__(self, settings: DraftSettings, metrics: RelayMetrics) -> None:
        """Call nobody yet. Raises TlsFilesBroken if the settings' TLS files cannot be used."""
        self._settings = settings
        self._metrics = metrics
        self._files = replica_tls_files(settings)
        self._allowed = Discovery(settings.link_targets)
        self._looked_up_s = float("-inf")
        self._looking = asyncio.Lock()
        self._calls: set[asyncio.Task[None]] = set()

    def dial(self, engine: EngineProcess, stream_id: int, address: str) -> None:
        """Open a stream for the engine, under its id; the engine learns its end."""
        stream = RelayedStream(engine, None, self._metrics, self._settings.stream_buffer_bytes, is_link=True)
        stream.expect(stream_id)  # the engine's first messages come right behind
        call = asyncio.create_task(self._call(engine, stream, stream_id, address), name="link")
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def close(self) -> None:
        """End all streams."""
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def _call(self, engine: EngineProcess, stream: RelayedStream, stream_id: int, address: str) -> None:
        try:
            channel = await self._open(address)
        except (LookupError, TlsFilesBroken) as error:
            _log.warning("link_refused", target=address, reason=str(error))
            engine.close_stream(stream_id, str(error))
            return
        self._metrics.links.inc()
        try:
            call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.current.stream_stream(_METHOD)()
            await stream.call(call)
        finally:
            self._metrics.links.dec()
            await channel.close()

    async def _open(self, address: str) -> ReplicaChannel:
        """A channel to a target, for one stream: an engine has one to each. Raises LookupError, TlsFilesBroken.

        LookupError: the settings do not name the target.
        """
        target = await self._find(address)
        if target is None:
            raise LookupError(f"link_targets of the draft does not name {address}")
        settings = self._settings
        if target.server_name is not None and settings.replica_tls and settings.replica_tls_server_name is None:
            settings = settings.model_copy(update={"replica_tls_server_name": target.server_name})
        return ReplicaChannel(address, settings, self._files)

    async def _find(self, address: str) -> ReplicaAddress | None:
        async with self._looking:
            found = self._listed(address)
            now_s = time.monotonic()
            if found is None and self._allowed.has_names and now_s - self._looked_up_s >= _LOOK_UP_S:
                self._looked_up_s = now_s
                await self._allowed.refresh()
                found = self._listed(address)
            return found

    def _listed(self, address: str) -> ReplicaAddress | None:
        return next((each for each in self._allowed.endpoints if each.address == address), None)
