"""A plan as a values file of the chart."""

from __future__ import annotations

import math
from typing import Any

import yaml

from specdec.plan.deployment import BATCH_TOKENS, MOST_BATCH, Deployment
from specdec.plan.simulation.autoscaler import ScalingRule
from specdec.plan.simulation.pair import Speculation

_WAITING_PER_PLACE = 2
_PROMETHEUS = "http://prometheus-operated.monitoring:9090"
_ZONES = {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"}
_NODES = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}


def values_of(
    deployment: Deployment, speculation: Speculation, sources: tuple[str, str], rule: ScalingRule | None = None
) -> dict[str, Any]:
    """Values of the chart.

    Args:
        deployment: what is needed.
        speculation: of the targets.
        sources: of target and draft as the chart names them; empty: left out.
        rule: by which targets are scaled, and their drafts alike; None: their numbers are fixed.
    """
    placement, num_coordinators = deployment.placement, deployment.num_coordinators
    is_gpu = placement.device.flops > 0
    most_sessions = max(1, min(256, round(1.5 * MOST_BATCH)))
    running = max(1, -(-deployment.num_targets * most_sessions // max(1, num_coordinators - deployment.spare)))
    spread = [_ZONES, _NODES] if deployment.num_zones > 1 else [_NODES]
    target: dict[str, Any] = {
        "replicas": deployment.num_targets,
        "gpu": {"count": placement.num_ranks if is_gpu else 0},
        "settings": {
            "max_batch_seqs": MOST_BATCH,
            "max_batch_tokens": BATCH_TOKENS["gpu" if is_gpu else "cpu"],
            "max_sessions": most_sessions,
            "adaptive_speculation": speculation is Speculation.ADAPTIVE,
        },
        "topologySpreadConstraints": spread,
    }
    draft: dict[str, Any] = {"enabled": deployment.num_drafts > 0}
    if deployment.num_drafts:
        gpu = {"count": 1 if placement.draft_device is not None and placement.draft_device.flops else 0}
        draft |= {"replicas": deployment.num_drafts, "gpu": gpu, "topologySpreadConstraints": spread}
    target_source, draft_source = sources
    if target_source:
        target["model"] = {"source": target_source}
    if draft_source and deployment.num_drafts:
        draft["model"] = {"source": draft_source}
    if placement.is_together:
        target["settings"]["own_draft"] = draft_source.removeprefix("hf://") or "DRAFT"
    if placement.draft_steps is None:
        target["settings"]["max_draft_tokens"] = 0
    if rule is not None:
        target["autoscaling"] = _autoscaling(rule, 1.0)
        if deployment.num_drafts:
            draft["autoscaling"] = _autoscaling(rule, deployment.num_drafts / deployment.num_targets)
    return {
        "coordinator": {
            "replicas": num_coordinators,
            "settings": {"max_running": running, "max_waiting": _WAITING_PER_PLACE * running},
            "topologySpreadConstraints": spread,
        },
        "gateway": {"replicas": deployment.num_gateways, "topologySpreadConstraints": spread},
        "target": target,
        "draft": draft,
        "redis": {"mode": deployment.redis},
    }


class _Plain(yaml.SafeDumper):
    """Writes equal parts out: readers know no anchors."""

    def ignore_aliases(self, data: object) -> bool:
        """For all data."""
        return True


def _autoscaling(rule: ScalingRule, share: float) -> dict[str, Any]:
    """`share`: replicas of the role over targets."""
    return {
        "enabled": True,
        "minReplicas": max(1, math.ceil(share * rule.min_replicas)),
        "maxReplicas": max(1, math.ceil(share * rule.max_replicas)),
        "sessionsPerReplica": max(1, round(rule.sessions_per_replica / share)),
        "scaleDownStabilizationSeconds": round(rule.scale_down_stabilization_s),
        "prometheusAddress": _PROMETHEUS,
    }


def values_file(
    deployment: Deployment,
    speculation: Speculation,
    sources: tuple[str, str],
    reasons: list[str],
    rule: ScalingRule | None = None,
) -> str:
    """YAML for `helm install -f FILE`; `reasons` are its first lines. An external Redis' URL is the operator's."""
    values = values_of(deployment, speculation, sources, rule)
    lines = ["Written by specdec plan: predictions, not measurements.", *reasons]
    if deployment.redis == "external":
        lines.append("redis.external.existingSecret: name the secret with your Redis' url.")
        values["redis"]["external"] = {"existingSecret": "specdec-redis", "urlKey": "url"}
    if rule is not None:
        lines.append("autoscaling.prometheusAddress: name your Prometheus, in place of the operator's usual one.")
    if values["target"]["settings"].get("own_draft") == "DRAFT":
        lines.append("target.settings.own_draft: put the draft's hub id or folder in place of DRAFT.")
    if not sources[0]:
        lines.append("target.model.source and draft.model.source: name your models.")
    comments = "\n".join(f"# {line}" for line in lines)
    return f"{comments}\n{yaml.dump(values, Dumper=_Plain, sort_keys=False)}"
