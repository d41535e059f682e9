"""Advice as files: one for `specdec up --config FILE`, one for `helm install -f FILE`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from specdec.commands.tune.advice import Advice
from specdec.commands.tune.prediction import SettingsChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentFacts:
    """Parts of the files that are not advice."""

    target_model: str
    draft_model: str
    device: str
    target_cores: tuple[int, ...] = ()
    """Cores of the engine; empty on other devices than CPU."""
    draft_cores: tuple[int, ...] = ()
    placement: str = "apart"
    """apart, or together: the target runs the draft on its own cores."""
    is_translated: bool = False
    """Whether the draft's tokenizer differs from the target's."""


def role_settings(choice: SettingsChoice) -> dict[str, dict[str, Any]]:
    """Settings of services by role."""
    draft_tokens = choice.draft_tokens
    return {
        "target": {"max_draft_tokens": draft_tokens},
        "draft": {
            "max_draft_tokens": draft_tokens,
            # After a fully accepted block the next one is then being drafted already.
            "max_ahead_tokens": min(64, 2 * draft_tokens + 1),
            "num_siblings": choice.num_siblings,
            "max_heads": choice.max_heads,
        },
        "coordinator": {"verify_mode": choice.mode},
    }


def up_file(advice: Advice, deployment: DeploymentFacts) -> str:
    """YAML for `specdec up --config FILE`."""
    settings = role_settings(advice.choice)
    cores = {"target": deployment.target_cores}
    if deployment.placement == "apart":
        cores["draft"] = deployment.draft_cores
    for role, own in cores.items():
        if own:
            settings[role] |= {"engine_cores": ",".join(map(str, own)), "num_threads": len(own)}
    values: dict[str, Any] = {"target": deployment.target_model, "draft": deployment.draft_model}
    values["device"] = deployment.device
    values["placement"] = deployment.placement
    roles = ["target", "draft", "coordinator"]
    if not advice.speculate:
        values["num-drafts"] = 0
        settings["target"].pop("max_draft_tokens")
        roles = ["target"]
    for role in roles:
        if settings[role]:
            values[f"{role}-set"] = [f"{name}={value}" for name, value in settings[role].items()]
    return _commented(advice, {"up": values})


def chart_file(advice: Advice, deployment: DeploymentFacts) -> str:
    """YAML for `helm install -f FILE`. Pods have their own cores, so it sets threads only."""
    settings = role_settings(advice.choice)
    if deployment.target_cores:
        settings["target"]["num_threads"] = len(deployment.target_cores)
        settings["draft"]["num_threads"] = max(1, len(deployment.draft_cores))
    if not advice.speculate:
        settings["target"].pop("max_draft_tokens")
        values: dict[str, dict[str, Any]] = {"target": {"settings": settings["target"]}, "draft": {"enabled": False}}
    else:
        values = {role: {"settings": own} for role, own in settings.items()}
        if deployment.is_translated:  # `specdec up` detects this itself
            values["draft"]["asksTarget"] = True
    return _commented(advice, values)


def _commented(advice: Advice, values: Mapping[str, Any]) -> str:
    lines = "\n".join(f"# {reason}" for reason in ("Written by specdec tune.", *advice.reasons))
    return f"{lines}\n{yaml.safe_dump(dict(values), sort_keys=False)}"
