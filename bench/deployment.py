"""Deployments of this system on this machine: which models with which settings on which cores."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from bench.delay_proxy import DelayProxy
from bench.pairs import Pair, PairMember
from specdec.commands.measuring.progress import Progress
from specdec.commands.up.cluster import Cluster, free_port
from specdec.commands.up.cores import assign_cores, share_cores
from specdec.commands.up.mps import mps_is_wanted, shared_by_mps
from specdec.commands.up.plan import LocalPlan, Placement, plan_services

_LEAST_KV_BYTES = 1 << 30
_KV_ITEM_BYTES = {"cpu": 4, "cuda": 2}
_WARMUP_TOKENS = 4096
"""Tokens of the KV cache beyond the requests' own, so that prefixes stay cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDeployment:
    """What `specdec up` would start, on given cores."""

    pair: Pair
    cores: tuple[int, ...]
    device: str = "cpu"
    placement: Placement = "apart"
    num_targets: int = 1
    is_plain: bool = False
    """Whether there is no draft. On CPU the target's engine then has all cores but one, which the other processes
    share; with one or two cores, all processes share all."""
    most_tokens: int = 0
    """Tokens that the KV caches hold at once; on a GPU other deployments have the rest of the memory."""
    target: Mapping[str, object] = field(default_factory=dict)
    draft: Mapping[str, object] = field(default_factory=dict)
    coordinator: Mapping[str, object] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, object]:
        """Settings that differ from the defaults, for the results."""
        return {"target": dict(self.target), "draft": dict(self.draft), "coordinator": dict(self.coordinator)}


@contextmanager
def running(
    deployment: MeasuredDeployment, progress: Progress, proxy: DelayProxy | None = None, second: str = ""
) -> Iterator[Cluster]:
    """Run a deployment within the context; meanwhile this thread, the client's, is pinned to `client_cores`.

    The proxy, if there is one, delays all that drafts send and receive. `second`: name of a second coordinator for the
    same replicas, which relays all proposals.

    Raises ClusterFailed.
    """
    specs = plan_services(_plan(deployment), cores=deployment.cores)
    if deployment.is_plain and deployment.device == "cpu":
        specs = [dataclasses.replace(spec, cores=deployment.cores) for spec in specs]
    if second:
        first = next(spec for spec in specs if spec.role == "coordinator")
        port = first.address.rpartition(":")[2]
        address = first.address.replace(port, str(free_port()))
        arguments = [text.replace(f"--port={port}", f"--port={address.rpartition(':')[2]}") for text in first.arguments]
        relaying = (*arguments, "--proposal-path=relayed")
        specs.append(dataclasses.replace(first, name=second, address=address, arguments=relaying))
    if proxy is not None:
        specs = proxy.far_drafts(specs)
    with (
        pinned(client_cores(deployment.cores, deployment.placement)),
        shared_by_mps(specs, progress.tell, is_wanted=mps_is_wanted(os.environ)) as sharing_specs,
        Cluster(sharing_specs) as cluster,
    ):
        cluster.start(lambda what: progress.tell(f"waiting for {what}"))
        yield cluster


def client_cores(cores: Sequence[int], placement: Placement = "apart") -> tuple[int, ...]:
    """The coordinator's cores; where there are enough cores, no thread of the target runs on them."""
    return (share_cores(cores) if placement == "together" else assign_cores(cores)).shared


@contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Pin this thread, and the threads and processes that it starts, to these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _plan(deployment: MeasuredDeployment) -> LocalPlan:
    target, draft = dict(deployment.target), {**deployment.pair.draft_settings, **deployment.draft}
    target.setdefault("kv_cache_memory_bytes", _kv_bytes(deployment, deployment.pair.target))
    if deployment.device != "cpu" and not deployment.is_plain and "drafters" not in draft:
        draft.setdefault("kv_cache_memory_bytes", _kv_bytes(deployment, deployment.pair.draft))
    if deployment.device == "cpu" and deployment.is_plain:
        cores = deployment.cores
        engine = cores[:-1] if len(cores) > 2 else cores
        target |= {"engine_cores": ",".join(map(str, engine)), "num_threads": len(engine)}
    return LocalPlan(
        target_model=str(deployment.pair.target.folder),
        draft_model=str(deployment.pair.draft.folder),
        device=deployment.device,
        placement=deployment.placement,
        num_targets=deployment.num_targets,
        num_drafts=0 if deployment.is_plain else 1,
        free_ports=True,
        target_settings=target,
        draft_settings=draft,
        coordinator_settings=deployment.coordinator,
    )


def _kv_bytes(deployment: MeasuredDeployment, model: PairMember) -> int:
    config = model.config
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    per_token = 2 * config["num_hidden_layers"] * num_kv_heads * head_dim * _KV_ITEM_BYTES[deployment.device]
    return max(_LEAST_KV_BYTES, per_token * (deployment.most_tokens + _WARMUP_TOKENS))
