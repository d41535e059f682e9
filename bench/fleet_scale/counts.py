"""What a release's services exchange, by its size: counted from their intervals, with records as they are encoded."""

from __future__ import annotations

import random
from dataclasses import dataclass

from bench.fleet_scale.fleets import DRAFTS_PER_TARGET, STREAMS, TARGETS_PER_COORDINATOR
from specdec.coordinator.links.replica_stream import SPREAD
from specdec.coordinator.replicas.subset import Subset
from specdec.coordinator.timings import Timings
from specdec.store.interface import ReplicaRecord
from specdec.store.records import encode_replica
from specdec.v1 import common_pb2 as pb
from specdec.wire.backoff import Backoff

_REPORTS_PER_S = 4.0
"""Load reports of a replica on each of its streams."""
_DISCOVERY_S, _REGISTRY_TTL_S, _WHOLE_S = 5.0, 15.0, 60.0
"""`discovery_s`, `registry_ttl_s`, and the time after which a registry that has not changed is read all the same."""
_SAMPLE = 500
"""Links whose attempts to connect are drawn."""
_LONGEST_BACKOFF_S = 5.0
"""`reconnect_backoff_max_s`."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Of a release, with all links or subsets."""

    num_targets: int
    subset_size: int | None
    num_links: int
    """Streams between coordinators and replicas."""
    most_links: int
    """Of a coordinator."""
    reports_per_s: float
    """Load reports that a coordinator gets."""
    passed_per_s: float
    """Targets' loads that it passes on to drafts."""
    former_passed_per_s: float
    """The same when each went to every draft that it is attached to."""
    read_mb_per_s: float
    """Of the registry, by all coordinators, while nothing changes."""
    former_read_mb_per_s: float
    """The same when it was read whole at each look; and while something changes at each look."""
    attempts_per_s: float
    """Attempts of a coordinator to connect after a third of the replicas is lost, in the worst second."""
    attaches: int
    """Streams that a coordinator opens in one turn when they are back."""


def counts(num_targets: int, subset_size: int | None) -> Counts:
    """Count for a number of targets."""
    num_drafts, num_coordinators = DRAFTS_PER_TARGET * num_targets, max(3, num_targets // TARGETS_PER_COORDINATOR)
    coordinators = [f"10.0.{number // 250}.{number % 250}:50051" for number in range(num_coordinators)]
    links = []
    for own in coordinators[: min(20, num_coordinators)]:
        chosen = [
            len(Subset(subset_size).chosen(own, coordinators, [f"10.{role}.{n // 250}.{n % 250}" for n in range(num)]))
            for role, num in ((1, num_targets), (2, num_drafts))
        ]
        links.append(chosen)
    targets, drafts = (sum(each[role] for each in links) / len(links) for role in (0, 1))
    streams = STREAMS * num_targets / num_coordinators
    num_records = num_targets + num_drafts + num_coordinators
    looked = num_coordinators * num_records * record_bytes() / 1e6
    lost = round((targets + drafts) / 3)
    return Counts(
        num_targets=num_targets,
        subset_size=subset_size,
        num_links=round(num_coordinators * (targets + drafts)),
        most_links=max(map(sum, links)),
        reports_per_s=_REPORTS_PER_S * (targets + drafts),
        passed_per_s=_REPORTS_PER_S * min(streams, targets * drafts),
        former_passed_per_s=_REPORTS_PER_S * targets * drafts,
        read_mb_per_s=looked / _WHOLE_S,
        former_read_mb_per_s=looked / _DISCOVERY_S,
        attempts_per_s=lost * worst_second() / _SAMPLE,
        attaches=lost,
    )


def record_bytes() -> int:
    """Bytes of a replica in the registry."""
    identity = pb.ModelIdentity(
        name="meta-llama/Llama-3.1-70B-Instruct",
        vocab_size=128256,
        max_model_len=131072,
        eos_token_ids=[128001, 128008, 128009],
        tokenizer_digest="0" * 32,
        numerics_id="bfloat16-sm_90-tp4-00000000",
        constraints_id="0" * 32,
    )
    load = pb.LoadReport(num_running=200, num_sessions=200, max_sessions=256, kv_blocks_used=9000, kv_blocks_total=9999)
    info = pb.GetReplicaInfoResponse(identity=identity, load=load, version="0.2.0", instance_id="0" * 32)
    return len(encode_replica(ReplicaRecord("target", "10.1.200.200:50052", "0" * 32, "ready", info)))


def worst_second() -> int:
    """Attempts in the worst second of `_SAMPLE` links that are lost together, until the registry forgets them."""
    backoff = Backoff(Timings().reconnect_first_s, _LONGEST_BACKOFF_S, SPREAD, random.Random(1).uniform)
    seconds = [0] * (round(_REGISTRY_TTL_S + _DISCOVERY_S) + 1)
    for _ in range(_SAMPLE):
        at_s, num_failures = 0.0, 0
        while at_s < _REGISTRY_TTL_S + _DISCOVERY_S:
            seconds[int(at_s)] += 1
            num_failures += 1
            at_s += backoff.wait_s(num_failures)
    return max(seconds)
