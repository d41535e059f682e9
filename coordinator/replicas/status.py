"""Status of all known replicas and coordinators for clients, as many as fit into a message."""

from __future__ import annotations

from collections.abc import Iterable

from specdec.coordinator.links.draft_link import DraftLink
from specdec.coordinator.replicas.compatibility import unsound
from specdec.coordinator.replicas.fleet import Fleet
from specdec.coordinator.replicas.registry_view import RegistryView
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.message_sizes import ENTRY_OVERHEAD_BYTES

_MOST_REPLICA_BYTES = 2 * 2**20
"""Bytes of replicas listed, some 5000; half of gRPC's default message limit."""
_MOST_COORDINATOR_BYTES = 2**20
"""Bytes of coordinators listed."""


def describe_replicas(fleet: Fleet, registry: RegistryView | None) -> api.GetStatusResponse:
    """Connected replicas, registered ones that still load, and all coordinators."""
    linked = [
        api.ReplicaStatus(
            role=link.role,
            address=link.address,
            state=str(link.state),
            detail=link.detail,
            identity=_shown(link.identity),
            load=link.load,
            links=list(link.ways.values()) if isinstance(link, DraftLink) else (),
        )
        for link in fleet.links
    ]
    known = {(replica.role, replica.address) for replica in linked}
    loading = [r for role in ("target", "draft") for r in _registered(registry, role) if (role, r.address) not in known]
    coordinators = _registered(registry, "coordinator")
    status = api.GetStatusResponse(
        replicas=_that_fit([*linked, *loading], _MOST_REPLICA_BYTES),
        coordinators=_that_fit(coordinators, _MOST_COORDINATOR_BYTES),
    )
    num_listed = len(status.replicas) + len(status.coordinators)
    status.num_left_out = len(linked) + len(loading) + len(coordinators) - num_listed
    return status


def _registered(registry: RegistryView | None, role: str) -> list[api.ReplicaStatus]:
    records = () if registry is None else registry.records(role)
    return [
        api.ReplicaStatus(
            role=role, address=r.address, state=r.state, identity=_shown(r.info.identity), load=r.info.load
        )
        for r in records
    ]


def _shown(identity: pb.ModelIdentity | None) -> pb.ModelIdentity | None:
    """A replica's identity, unless it is unsound: then it may have any size."""
    return None if identity is None or unsound(identity) is not None else identity


def _that_fit(replicas: Iterable[api.ReplicaStatus], most_bytes: int) -> list[api.ReplicaStatus]:
    listed: list[api.ReplicaStatus] = []
    for replica in replicas:
        most_bytes -= replica.ByteSize() + ENTRY_OVERHEAD_BYTES
        if most_bytes >= 0:
            listed.append(replica)
    return listed
