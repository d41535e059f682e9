"""Find the replicas, and run a link to each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from specdec.config import CoordinatorSettings
from specdec.coordinator.decode_loop import DecodeLoop
from specdec.coordinator.links.draft_link import DraftLink
from specdec.coordinator.links.link_events import LinkSettings
from specdec.coordinator.links.target_link import TargetLink
from specdec.coordinator.recovery import DraftRecovery, TargetRecovery
from specdec.coordinator.replicas.registry_view import RegistryView
from specdec.coordinator.replicas.roster import Roster
from specdec.coordinator.replicas.subset import Subset
from specdec.coordinator.tasks import end_tasks
from specdec.coordinator.timings import Timings
from specdec.wire.channel import ReplicaChannel
from specdec.wire.discovery import Discovery, ReplicaAddress, keep_finding
from specdec.wire.tls import replica_tls_files
from specdec.wire.tls_files import TlsFiles


class Connections:
    """Links to the replicas that are configured by address, resolved from DNS names, or found in the registry."""

    def __init__(
        self,
        *,
        settings: CoordinatorSettings,
        timings: Timings,
        owner_id: str,
        targets: TargetRecovery,
        drafts: DraftRecovery,
        decode_loop: DecodeLoop,
        registry: RegistryView | None,
        own_address: Callable[[], str],
    ) -> None:
        """Connect to nothing yet.

        Args:
            settings: the replicas' addresses, and how to connect to them.
            timings: how long an attempt to connect may take, and the first wait after one.
            owner_id: this coordinator's name, to the replicas.
            targets: receives the events of the links to targets.
            drafts: receives the events of the links to drafts.
            decode_loop: receives the verdicts and proposals of all links.
            registry: lists more replicas, and the other coordinators; None without a shared store.
            own_address: this coordinator's address in the registry; empty before it is there.
        """
        self._settings = settings
        self._targets = targets
        self._drafts = drafts
        self._decode_loop = decode_loop
        self._registry = registry
        self._own_address = own_address
        self._link_settings = LinkSettings(
            owner_id=owner_id,
            lease_generation=1,
            connect_timeout_s=timings.connect_timeout_s,
            backoff_min_s=timings.reconnect_first_s,
            backoff_max_s=settings.reconnect_backoff_max_s,
            max_message_bytes=settings.max_message_bytes,
            grants_links=settings.proposal_path != "relayed",
        )
        self._tasks: list[asyncio.Task[None]] = []
        self.rosters: dict[str, Roster[TargetLink] | Roster[DraftLink]] = {}
        """The links, by role; empty before `open`."""
        self.tls_files: TlsFiles | None = None
        """Certificates for calls to replicas; None without TLS and before `open`."""

    def open(self) -> None:
        """Start links to the configured replicas, and keep looking for more. Raises TlsFilesBroken."""
        links, loop = self._link_settings, self._decode_loop
        files = self.tls_files = replica_tls_files(self._settings)

        def target(at: ReplicaAddress) -> TargetLink:
            return TargetLink(at.address, self._channel(at, files), links, events=self._targets, verdicts=loop)

        def draft(at: ReplicaAddress) -> DraftLink:
            return DraftLink(at.address, self._channel(at, files), links, events=self._drafts, proposals=loop)

        self.rosters = {
            "target": Roster(target, self._targets.set_links, self._targets.on_removed),
            "draft": Roster(draft, self._drafts.set_links, self._drafts.on_removed),
        }
        self._discover()

    async def close(self) -> None:
        """Close all links; replicas see the streams end."""
        await end_tasks(self._tasks)
        for roster in self.rosters.values():
            await roster.close()

    def _discover(self) -> None:
        settings, registry = self._settings, self._registry
        entries = {"target": settings.targets, "draft": settings.drafts}
        discoveries = {
            role: Discovery(entries[role], None if registry is None else partial(registry.endpoints, role))
            for role in self.rosters
        }

        subsets = {role: Subset(settings.subset_size) for role in self.rosters}

        def update() -> None:
            own, others = self._own_address(), () if registry is None else registry.coordinators()
            for role, roster in self.rosters.items():
                endpoints = discoveries[role].endpoints
                roster.update(endpoints, subsets[role].chosen(own, others, [each.address for each in endpoints]))

        if registry is None:
            update()  # with a registry, it is first asked for the other coordinators
        refreshers: list[Callable[[], Awaitable[object]]] = [d.refresh for d in discoveries.values() if d.has_names]
        if registry is not None:
            refreshers.append(registry.refresh)
        if refreshers:
            looking = keep_finding(settings.discovery_s, refreshers, update)
            self._tasks.append(asyncio.create_task(looking, name="discovery"))

    def _channel(self, endpoint: ReplicaAddress, files: TlsFiles | None) -> ReplicaChannel:
        settings = self._settings
        if endpoint.server_name is not None and settings.replica_tls and settings.replica_tls_server_name is None:
            settings = settings.model_copy(update={"replica_tls_server_name": endpoint.server_name})
        return ReplicaChannel(endpoint.address, settings, files)
