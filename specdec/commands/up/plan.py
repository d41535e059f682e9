"""Turns the flags of `specdec up` into the services to start on this machine."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from specdec.commands.errors import ClusterFailed
from specdec.commands.shipped_pair import shipped_pair
from specdec.commands.up.cluster import RoleSettings, free_port, port_is_free, service_spec
from specdec.commands.up.cores import CoreAssignment, assign_cores, share_cores
from specdec.commands.up.devices import (
    DevicePlan,
    EnginePlace,
    count_gpus,
    divide_memory,
    free_gpu_bytes,
    plan_devices,
    weights_bytes,
)
from specdec.commands.up.service_process import ServiceSpec
from specdec.engine.checkpoints.files import find_model_files, read_tokenizer
from specdec.engine.checkpoints.folder import check_weights
from specdec.engine.checkpoints.tokenizer_conversion import require_tokenizer
from specdec.engine.errors import ModelLoadError

Placement = Literal["apart", "together"]
PORTS = {"coordinator": 50051, "target": 50052, "draft": 50053, "gateway": 8000}
_FEW_CORES = 2
_WITHOUT_ENGINE = {"api", "specdec_target_api", "specdec_target_config"}
"""Settings and variables, in lower case, with which a target may need no engine."""
_LOADING = ("LOAD_FORMAT", "CONFIG")
"""Ends of variables that may ask for random weights."""
METRICS_PORTS = {"coordinator": 9090, "target": 9092, "draft": 9093}
DRAIN_S = 5.0
# Replicas load for seconds; the coordinator should connect as soon as they are ready.
RECONNECT_S = 0.5
DISCOVERY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlan:
    """The models, replicas, ports and settings of a local deployment."""

    target_model: str
    draft_model: str
    """Ignored if draft_settings have drafters, which need no model."""
    device: str = "auto"
    num_targets: int = 1
    num_drafts: int = 1
    ports: Mapping[str, int] = field(default_factory=lambda: PORTS)
    free_ports: bool = False
    """Take free ports and serve no metrics, so that several clusters can run on one machine."""
    redis_url: str | None = None
    """Redis whose registry lists the services; None: settings list them."""
    placement: Placement = "apart"
    """Apart: a draft service; together: the target runs the draft in turns with itself."""
    target_settings: Mapping[str, object] = field(default_factory=dict)
    draft_settings: Mapping[str, object] = field(default_factory=dict)
    coordinator_settings: Mapping[str, object] = field(default_factory=dict)
    gateway: bool = False
    """Whether to start a gateway."""
    gateway_settings: Mapping[str, object] = field(default_factory=dict)


def shipped_model(role: str) -> str:
    """Return the folder of the shipped target or draft. Raises ClusterFailed when the pair is not installed."""
    pair = shipped_pair()
    if pair is None:
        raise ClusterFailed(
            f"there is no model: name one with --{role} (a folder or hub id), or pip install specdec-shipped-models"
        )
    return str(pair / role)


def plan_services(
    plan: LocalPlan, *, environment: Mapping[str, str] | None = None, cores: Sequence[int] | None = None
) -> list[ServiceSpec]:
    """Return the services of a plan, replicas first.

    Args:
        environment: variables with SPECDEC_* settings; None: this process's.
        cores: usable cores; None: this process's.

    Raises:
        ClusterFailed: there is no such device, or too little memory.
    """
    environment = os.environ if environment is None else environment
    usable = sorted(os.sched_getaffinity(0)) if cores is None else cores
    devices = _devices(plan)
    assignment = _cores_of_gpu_engines(assign_cores(usable)) if devices.is_cuda else assign_cores(usable)
    if plan.placement == "together" and _runs_drafts(plan):
        plan, assignment = _with_own_drafts(plan, devices), share_cores(usable)
    elif plan.num_drafts == 0 and not devices.is_cuda:
        assignment = share_cores(usable)
    specs = _replicas(plan, "target", devices.targets, assignment, environment)
    if "drafters" in plan.draft_settings:
        # Such a draft runs no model; it asks the target for its tokenizer.
        own: dict[str, object] = {"target": specs[0].address, **plan.draft_settings}
        plan = dataclasses.replace(plan, draft_model="", draft_settings=own)
    elif _runs_drafts(plan) and may_differ(plan.target_model, plan.draft_model):
        own = {"target": specs[0].address, **plan.draft_settings}
        plan = dataclasses.replace(plan, draft_settings=own)
    targets = [spec.address for spec in specs]
    specs += _replicas(plan, "draft", devices.drafts[: plan.num_drafts], assignment, environment, targets)
    addresses = {role: [spec.address for spec in specs if spec.role == role] for role in PORTS}
    replicas = {"targets": addresses["target"], "drafts": addresses["draft"]} if plan.redis_url is None else {}
    settings = RoleSettings(
        defaults={
            **_common_defaults(plan, "coordinator", 0),
            "reconnect_backoff_max_s": RECONNECT_S,
            "discovery_s": DISCOVERY_S,
            # A restarted coordinator continues the streams of its predecessor.
            "resume_secret": secrets.token_hex(32),
        },
        overrides=plan.coordinator_settings,
        fixed=replicas,
    )
    port = _port(plan, "coordinator", 0)
    specs.append(
        service_spec("coordinator", "coordinator", port, settings, environment=environment, cores=assignment.shared)
    )
    if plan.gateway:
        settings = RoleSettings(
            defaults={"log_format": "console", "drain_s": DRAIN_S},
            overrides=plan.gateway_settings,
            fixed={"coordinators": [specs[-1].address]},
        )
        port = _port(plan, "gateway", 0)
        specs.append(
            service_spec("gateway", "gateway", port, settings, environment=environment, cores=assignment.shared)
        )
    return specs


def _cores_of_gpu_engines(assignment: CoreAssignment) -> CoreAssignment:
    """Let GPU engines share cores: each needs one for Python, and more for threads of libraries."""
    together = tuple(sorted({*assignment.target_engine, *assignment.draft_engine}))
    return CoreAssignment(together, together, assignment.shared)


def _runs_drafts(plan: LocalPlan) -> bool:
    """Whether there is a draft model that a target could run itself."""
    return bool(plan.draft_model) and plan.num_drafts > 0 and "drafters" not in plan.draft_settings


def _with_own_drafts(plan: LocalPlan, devices: DevicePlan) -> LocalPlan:
    if plan.num_drafts > 1:
        raise ClusterFailed("--placement together needs --num-drafts 1: a target runs one draft on its own device")
    own: dict[str, object] = {"model": plan.draft_model, **plan.draft_settings}
    budgets = [place.kv_bytes for place in devices.drafts if place.kv_bytes is not None]
    if budgets:
        own.setdefault("kv_cache_memory_bytes", min(budgets))
    settings = {"own_draft": json.dumps(own), **plan.target_settings}
    return dataclasses.replace(plan, num_drafts=0, target_settings=settings)


def check_models(plan: LocalPlan) -> None:
    """Check the files of local models before a service starts. Raises ClusterFailed."""
    draft = plan.draft_model if _runs_drafts(plan) else ""
    roles = (("TARGET", plan.target_model, plan.target_settings), ("DRAFT", draft, plan.draft_settings))
    for role, model, settings in roles:
        if (not Path(model).expanduser().exists() and not model.startswith(("/", ".", "~"))) or not model:
            continue  # a hub id, which the service loads
        may_lack_weights = (
            "load_format" in settings or {f"SPECDEC_{role}_{name}" for name in _LOADING} & os.environ.keys()
        )
        try:
            folder, _ = find_model_files(model, None)
            if not may_lack_weights:
                check_weights(folder)
            require_tokenizer(folder, read_tokenizer(folder).tokenizer_json)
        except ModelLoadError as error:
            raise ClusterFailed(str(error)) from error


def require_engine(target_settings: Mapping[str, object]) -> None:
    """Raise ClusterFailed if the target needs an engine and torch is not installed."""
    given = {*target_settings, *(name.lower() for name in os.environ)}
    if importlib.util.find_spec("torch") is None and not given & _WITHOUT_ENGINE:
        raise ClusterFailed("this needs torch: pip install 'specdec[engine]'")


def gateway_is_installed() -> bool:
    """Whether the gateway's packages are installed."""
    return importlib.util.find_spec("fastapi") is not None and importlib.util.find_spec("uvicorn") is not None


def _devices(plan: LocalPlan) -> DevicePlan:
    target_ranks = [_num_ranks(plan.target_settings)] * plan.num_targets
    draft_ranks = [_num_ranks(plan.draft_settings)] * plan.num_drafts
    try:
        devices = plan_devices(plan.device, 0 if plan.device == "cpu" else count_gpus(), target_ranks, draft_ranks)
        if devices.is_cuda and plan.placement == "together" and _runs_drafts(plan):
            # One process runs both, so each target has a draft on its own GPUs.
            devices = DevicePlan(devices.targets, devices.targets)
        if devices.is_cuda:
            bytes_of_models = weights_bytes(plan.target_model), weights_bytes(plan.draft_model)
            return divide_memory(devices, free_gpu_bytes, *bytes_of_models)
    except ValueError as error:
        raise ClusterFailed(str(error)) from error
    return devices


def _replicas(
    plan: LocalPlan,
    role: str,
    places: Sequence[EnginePlace],
    assignment: CoreAssignment,
    environment: Mapping[str, str],
    link_targets: Sequence[str] = (),
) -> list[ServiceSpec]:
    is_target = role == "target"
    engine_cores = assignment.target_engine if is_target else assignment.draft_engine
    specs = []
    for number, (place, share) in enumerate(zip(places, split_evenly(engine_cores, len(places)), strict=True)):
        on_cpu = not place.gpus
        cores = share if on_cpu else engine_cores
        defaults: dict[str, object] = _common_defaults(plan, role, number)
        defaults |= {"device": place.device, "engine_cores": cores}
        own = plan.target_settings if is_target else plan.draft_settings
        model = plan.target_model if is_target else plan.draft_model
        if link_targets:
            defaults["link_targets"] = list(link_targets)
        if on_cpu:
            defaults["num_threads"] = max(1, len(cores) // place.num_ranks)
        if place.kv_bytes is not None:
            defaults["kv_cache_memory_bytes"] = place.kv_bytes
        settings = RoleSettings(defaults=defaults, overrides=own, fixed={"model": model} if model else {})
        name = role if number == 0 else f"{role}-{number}"
        port = _port(plan, role, number)
        all_cores = sorted({*cores, *assignment.shared})
        spec = service_spec(role, name, port, settings, environment=environment, cores=all_cores)
        specs.append(dataclasses.replace(spec, gpus=tuple(place.gpus)))
    return specs


def _num_ranks(settings: Mapping[str, object]) -> int:
    """Ranks of a replica; the service itself refuses a malformed setting."""
    size = str(settings.get("tensor_parallel_size", 1))
    return max(1, int(size)) if size.isdecimal() else 1


def _common_defaults(plan: LocalPlan, role: str, number: int) -> dict[str, object]:
    metrics_port = None
    if number == 0 and not plan.free_ports:
        usual = METRICS_PORTS[role]
        metrics_port = usual if port_is_free(usual) else free_port()
    defaults: dict[str, object] = {"metrics_port": metrics_port, "log_format": "console", "drain_s": DRAIN_S}
    if plan.redis_url is not None:  # no flag: it may hold a password, and process lists show flags
        defaults["redis_url"] = plan.redis_url
    return defaults


def _port(plan: LocalPlan, role: str, number: int) -> int:
    return free_port() if plan.free_ports or number else plan.ports[role]


def split_evenly(cores: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Return `count` shares of the cores, as equal as possible; with fewer cores than shares they overlap."""
    if count == 0:
        return []
    if len(cores) < count:
        return [(cores[number % len(cores)],) for number in range(count)]
    bounds = [len(cores) * number // count for number in range(count + 1)]
    return [tuple(cores[low:high]) for low, high in itertools.pairwise(bounds)]


def usual_placement(device: str, cores: Sequence[int]) -> Placement:
    """The placement that is faster in most cases, without a measurement.

    It is together on at most two CPU cores, where one engine would share its core with all other processes.
    """
    return "together" if device == "cpu" and len(cores) <= _FEW_CORES else "apart"


def describe_placement(specs: Sequence[ServiceSpec]) -> list[tuple[str, str, str]]:
    """Return (name, address, place) of each service, for people."""
    rows = []
    for spec in specs:
        prefix = f"SPECDEC_{spec.role.upper()}_"
        device = spec.environment.get(f"{prefix}DEVICE", "")
        engine_cores = spec.environment.get(f"{prefix}ENGINE_CORES", "")
        place = f"cores {engine_cores}" if device == "cpu" and engine_cores else device
        if any(argument.startswith("--own-draft=") for argument in spec.arguments):
            place += ", also runs the draft"
        rows.append((spec.name, spec.address, place))
    return rows


def may_differ(target_model: str, draft_model: str) -> bool:
    """Whether a draft may have to translate: its tokenizer differs, or is not on disk (a hub id)."""
    try:
        target, draft = (_digest(Path(model).expanduser()) for model in (target_model, draft_model))
    except (OSError, ValueError):
        return True
    return target is None or draft is None or target != draft


def _digest(folder: Path) -> str | None:
    return read_tokenizer(folder).digest if (folder / "config.json").is_file() else None
