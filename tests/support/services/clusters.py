"""Starts clusters on loopback: real processes, real sockets and real models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdec.commands.up.cluster import Cluster, ClusterTimeouts
from specdec.commands.up.plan import LocalPlan, plan_services
from specdec.commands.up.service_process import ServiceSpec
from tests.support.releases import Build
from tests.support.services.model_pair import ModelPair

TIMEOUTS = ClusterTimeouts(start_s=200.0, connect_s=100.0, stop_s=10.0)
TINY_HOLD_OFF_MS = 50
MakeCluster = Callable[..., Cluster]
"""Type of the fixture `make_cluster`."""
Arrange = Callable[[Sequence[ServiceSpec]], list[ServiceSpec]]


def start_cluster(
    pair: ModelPair, log_dir: Path, *, build: Build | None = None, arrange: Arrange = list, **plan: Any
) -> Cluster:
    """Start a cluster on free ports, of this version unless a build is given. Raises ClusterFailed.

    `plan`: fields of LocalPlan. `arrange`: changes the services before they start.

    A step of a tiny target is shorter than a draft's answer, so its cost model would rightly not wait. A fixed hold-off
    makes it verify proposals, and this version's clusters suspend no drafts.
    """
    target_settings = {**plan.pop("target_settings", {})}
    if build is None:
        target_settings.setdefault("adaptive_speculation", False)
    if "tiny" in str(pair.target):
        target_settings.setdefault("hold_off_ms", TINY_HOLD_OFF_MS)
    settings = LocalPlan(
        target_model=str(pair.target),
        draft_model=str(pair.draft),
        device=plan.pop("device", "cpu"),
        free_ports=True,
        target_settings=target_settings,
        **plan,
    )
    specs = plan_services(settings, environment={})
    if build is not None:
        specs = [replace(spec, environment={**spec.environment, **build.environment}) for spec in specs]
    cluster = Cluster(arrange(specs), log_dir=log_dir, timeouts=TIMEOUTS)
    cluster.start()
    return cluster
