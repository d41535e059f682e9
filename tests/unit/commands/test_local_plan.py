"""What `specdec up` starts, on which cores and devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from specdec.commands.errors import ClusterFailed
from specdec.commands.shipped_pair import shipped_pair
from specdec.commands.up import devices
from specdec.commands.up import plan as planning
from specdec.commands.up.command import parse_settings
from specdec.commands.up.cores import CoreAssignment, assign_cores, share_cores
from specdec.commands.up.plan import LocalPlan, describe_placement, plan_services, split_evenly, usual_placement
from specdec.commands.up.service_process import ServiceSpec
from specdec.config import DraftSettings, TargetSettings, load_settings
from tests.support.services.model_pair import with_another_tokenizer

ROLES = ("TARGET", "DRAFT", "COORDINATOR")


@pytest.mark.parametrize(
    ("num_cores", "target", "draft", "shared"),
    [
        (1, (0,), (0,), (0,)),
        (2, (0,), (1,), (1,)),
        (3, (0,), (1,), (2,)),
        (4, (0, 1), (2,), (3,)),
        (8, (0, 1, 2, 3), (4,), (5, 6, 7)),
    ],
)
def test_the_target_gets_about_half_of_the_cores(
    num_cores: int, target: tuple[int, ...], draft: tuple[int, ...], shared: tuple[int, ...]
) -> None:
    assert assign_cores(range(num_cores)) == CoreAssignment(target, draft, shared)


def test_core_numbers_need_not_begin_at_zero() -> None:
    assert assign_cores([7, 5]) == CoreAssignment((5,), (7,), (7,))


def test_no_core_is_an_error() -> None:
    with pytest.raises(ValueError, match="no cores"):
        assign_cores([])


def test_replicas_share_the_cores_of_their_role_evenly() -> None:
    assert split_evenly([0, 1, 2, 3], 2) == [(0, 1), (2, 3)]
    assert split_evenly([0, 1, 2], 2) == [(0,), (1, 2)]
    assert split_evenly([4], 2) == [(4,), (4,)]


@pytest.mark.parametrize(
    ("device", "num_gpus", "target", "draft"),
    [
        ("auto", 0, "cpu", "cpu"),
        ("auto", 1, "cuda:0", "cuda:0"),
        ("auto", 2, "cuda:0", "cuda:1"),
        ("cuda", 8, "cuda:0", "cuda:1"),
        ("cpu", 2, "cpu", "cpu"),
    ],
)
def test_each_engine_has_its_own_gpu_where_there_are_two(device: str, num_gpus: int, target: str, draft: str) -> None:
    expected = devices.DevicePlan((devices.EnginePlace(target),), (devices.EnginePlace(draft),))
    assert devices.plan_devices(device, num_gpus) == expected


@pytest.mark.parametrize(
    ("num_gpus", "target_ranks", "draft_ranks", "expected"),
    [
        (4, [2], [1], ["cuda:0", "cuda:2"]),
        (2, [2], [1], ["cuda:0", "cuda:0"]),
        (4, [2, 2], [1], ["cuda:0", "cuda:2", "cuda:0"]),
        (3, [1, 1], [1], ["cuda:0", "cuda:1", "cuda:2"]),
        (1, [1, 1], [1], ["cuda:0", "cuda:0", "cuda:0"]),
        (8, [4], [1, 1], ["cuda:0", "cuda:4", "cuda:5"]),
        (3, [2], [2], ["cuda:0", "cuda:0"]),
    ],
)
def test_ranks_and_replicas_take_the_gpus_that_fewest_others_have(
    num_gpus: int, target_ranks: list[int], draft_ranks: list[int], expected: list[str]
) -> None:
    chosen = devices.plan_devices("cuda", num_gpus, target_ranks, draft_ranks)
    assert [place.device for place in (*chosen.targets, *chosen.drafts)] == expected


def test_more_ranks_than_gpus_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel_size 4: .* there are 2"):
        devices.plan_devices("cuda", 2, [4])


def test_free_memory_is_asked_for_by_a_process_that_is_gone_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks a GPU is on it from then on: before MPS, and with some hundred MiB of it."""
    torch = tmp_path / "torch.py"
    torch.write_text("class cuda:\n    mem_get_info = staticmethod(lambda gpu: (1000 * gpu + 7, 1))\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # bytecode of a file of the same second and size would be used
    assert devices.free_gpu_bytes(3) == 3007
    torch.write_text("class cuda:\n    def mem_get_info(gpu):\n        raise RuntimeError('CUDA error: 101')\n")
    with pytest.raises(ValueError, match=r"GPU 1 did not report its free memory: RuntimeError: CUDA error: 101"):
        devices.free_gpu_bytes(1)
    torch.write_text("import time\nclass cuda:\n    mem_get_info = staticmethod(lambda gpu: time.sleep(100))\n")
    monkeypatch.setattr(devices, "_MOST_ASKING_S", 0.5)
    with pytest.raises(ValueError, match=r"GPU 1 did not report its free memory in 0\.5 s; if NVIDIA MPS runs, end it"):
        devices.free_gpu_bytes(1)


def test_services_on_gpus_have_their_devices_budgets_and_all_cores_of_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.commands.up.plan.count_gpus", lambda: 3)
    monkeypatch.setattr(
        "specdec.commands.up.plan.free_gpu_bytes", lambda gpu: (gpu + 1) * 2**30 + 2 * devices.ENGINE_BYTES
    )
    wish = LocalPlan(
        target_model="T",
        draft_model="D",
        num_targets=2,
        device="cuda",
        free_ports=True,
        target_settings={"tensor_parallel_size": 2},
    )
    first, second, draft, _ = plan_services(wish, environment={}, cores=range(16))
    shares = devices.TARGET_KV_SHARE + devices.DRAFT_KV_SHARE
    assert [spec.environment["SPECDEC_TARGET_DEVICE"] for spec in (first, second)] == ["cuda:0", "cuda:0"]
    assert draft.environment["SPECDEC_DRAFT_DEVICE"] == "cuda:2"
    assert [first.gpus, second.gpus, draft.gpus] == [(0, 1), (0, 1), (2,)]
    assert first.environment["SPECDEC_TARGET_KV_CACHE_MEMORY_BYTES"] == str(int(2**30 * shares / 2))
    assert "SPECDEC_DRAFT_KV_CACHE_MEMORY_BYTES" not in draft.environment
    assert "SPECDEC_TARGET_NUM_THREADS" not in first.environment
    assert draft.environment["SPECDEC_DRAFT_ENGINE_CORES"] == "0,1,2,3,4,5,6,7,8"
    assert first.environment["SPECDEC_TARGET_ENGINE_CORES"] == draft.environment["SPECDEC_DRAFT_ENGINE_CORES"]


def test_a_draft_in_the_target_has_a_budget_on_the_targets_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.commands.up.plan.count_gpus", lambda: 2)
    monkeypatch.setattr("specdec.commands.up.plan.free_gpu_bytes", lambda gpu: 2**30 + 2 * devices.ENGINE_BYTES)
    wish = LocalPlan(target_model="T", draft_model="D", device="cuda", free_ports=True, placement="together")
    target, _ = plan_services(wish, environment={}, cores=range(4))
    settings = load_settings(TargetSettings, list(target.arguments), env_prefix=TargetSettings.env_prefix, prog="t")
    assert target.environment["SPECDEC_TARGET_KV_CACHE_MEMORY_BYTES"] == str(int(2**30 * devices.TARGET_KV_SHARE))
    assert settings.own_draft_settings is not None
    assert settings.own_draft_settings.kv_cache_memory_bytes == int(2**30 * devices.DRAFT_KV_SHARE)


@pytest.mark.parametrize(("ranks", "threads"), [(1, "4"), ("2", "2"), (8, "1"), ("two", "4")])
def test_the_ranks_of_a_replica_share_its_threads(ranks: object, threads: str) -> None:
    plan = LocalPlan(
        target_model="t",
        draft_model="d",
        device="cpu",
        target_settings={"tensor_parallel_size": ranks},
        free_ports=True,
    )
    target, draft, _ = plan_services(plan, environment={}, cores=range(8))
    assert target.environment["SPECDEC_TARGET_NUM_THREADS"] == threads
    assert draft.environment["SPECDEC_DRAFT_NUM_THREADS"] == "1"


def test_asking_for_a_gpu_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="no GPU"):
        devices.plan_devices("cuda", 0)


def test_a_shared_gpu_is_divided_so_that_neither_takes_all() -> None:
    plan = devices.divide_memory(devices.plan_devices("cuda", 1), lambda gpu: 80 * 2**30, 16 * 2**30, 4 * 2**30)
    [target], [draft] = plan.targets, plan.drafts
    free = 60 * 2**30 - 2 * devices.ENGINE_BYTES
    assert target.kv_bytes == int(free * devices.TARGET_KV_SHARE)
    assert draft.kv_bytes == int(free * devices.DRAFT_KV_SHARE)


@pytest.mark.parametrize("gib", [24, 32, 48, 80])
def test_two_engines_keep_what_each_needs_beside_weights_and_keys(gib: int) -> None:
    free, weights = int(0.98 * gib * 2**30), (16 * 2**30, int(2.4 * 2**30))
    plan = devices.divide_memory(devices.plan_devices("cuda", 1), lambda gpu: free, *weights)
    keys = sum(place.kv_bytes or 0 for place in (*plan.targets, *plan.drafts))
    assert free - sum(weights) - keys >= 2 * devices.ENGINE_BYTES
    assert keys > 2**30


def test_a_gpu_of_its_own_is_not_divided() -> None:
    alone = devices.plan_devices("cuda", 2)
    assert devices.divide_memory(alone, lambda gpu: 10, 2**40, 2**40) == alone


def test_two_targets_on_one_gpu_share_what_a_target_and_a_draft_would() -> None:
    free = 2 * devices.ENGINE_BYTES + 100
    plan = devices.divide_memory(devices.plan_devices("cuda", 1, [1, 1], []), lambda gpu: free, 20, 0)
    assert [place.kv_bytes for place in plan.targets] == [27, 27]


def test_weights_that_do_not_fit_a_shared_gpu_are_an_error() -> None:
    free = 2 * devices.ENGINE_BYTES + 2 * 2**30
    with pytest.raises(ValueError, match=r"GPU 0 has .* weights of 3\.0 GiB with 2 engines need .*: use another GPU"):
        devices.divide_memory(devices.plan_devices("cuda", 1), lambda gpu: free, 2 * 2**30, 2**30)


def plan(environment: dict[str, str] | None = None, **wishes: object) -> list[ServiceSpec]:
    wish = LocalPlan(target_model="T", draft_model="D", device="cpu", **wishes)  # type: ignore[arg-type]
    return plan_services(wish, environment=environment or {}, cores=range(4))


def test_three_services_are_planned_with_the_coordinator_last() -> None:
    target, draft, coordinator = plan()
    assert (target.role, draft.role, coordinator.role) == ("target", "draft", "coordinator")
    assert target.environment["SPECDEC_TARGET_ENGINE_CORES"] == "0,1"
    assert target.environment["SPECDEC_TARGET_NUM_THREADS"] == "2"
    assert target.cores == (0, 1, 3)
    assert "--model=T" in target.arguments
    assert f"--targets={target.address}" in coordinator.arguments
    assert f"--drafts={draft.address}" in coordinator.arguments


def test_what_the_environment_sets_is_not_overridden_by_a_default() -> None:
    target, *_ = plan({"SPECDEC_TARGET_NUM_THREADS": "7"})
    assert "SPECDEC_TARGET_NUM_THREADS" not in target.environment


def test_settings_go_to_their_service_as_flags() -> None:
    target, draft, _ = plan(target_settings={"max_draft_tokens": 3, "reflection": False})
    assert "--max-draft-tokens=3" in target.arguments
    assert "--no-reflection" in target.arguments
    assert "--max-draft-tokens=3" not in draft.arguments


@pytest.mark.parametrize(
    ("role", "name"),
    [
        ("target", "model"),
        ("draft", "port"),
        ("coordinator", "targets"),
        ("gateway", "host"),
        ("gateway", "coordinators"),
    ],
)
def test_what_the_command_sets_itself_is_no_setting(role: str, name: str) -> None:
    with pytest.raises(ClusterFailed, match=f"--{role}-set: this command sets {name} itself"):
        plan(gateway=True, **{f"{role}_settings": {name: "x"}})


def test_replicas_have_names_and_ports_of_their_own() -> None:
    specs = plan(num_targets=2, num_drafts=0, free_ports=True)
    assert [spec.name for spec in specs] == ["target", "target-1", "coordinator"]
    assert len({spec.address for spec in specs}) == 3
    assert "--drafts=" in specs[-1].arguments


def test_with_a_redis_services_find_each_other_there_and_its_url_is_no_flag() -> None:
    url = "redis://:secret@127.0.0.1:6379"
    specs = plan(redis_url=url)
    assert [spec.environment[f"SPECDEC_{name}_REDIS_URL"] for spec, name in zip(specs, ROLES, strict=True)] == [url] * 3
    flags = [argument for spec in specs for argument in spec.arguments]
    assert not [flag for flag in flags if flag.startswith(("--targets", "--drafts")) or "secret" in flag]


def test_placement_is_told_by_cores_or_device() -> None:
    rows = describe_placement(plan())
    assert rows[0] == ("target", "127.0.0.1:50052", "cores 0,1")
    assert rows[2] == ("coordinator", "127.0.0.1:50051", "")
    assert describe_placement(plan(placement="together"))[0][2] == "cores 0,1,2, also runs the draft"


def test_without_a_measurement_few_cores_are_shared() -> None:
    assert [usual_placement("cpu", range(n)) for n in (1, 2, 3)] == ["together", "together", "apart"]
    assert usual_placement("cuda", range(2)) == "apart"


def test_a_missing_gpu_is_told_as_a_failure_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.commands.up.plan.count_gpus", lambda: 0)
    with pytest.raises(ClusterFailed, match="no GPU"):
        plan_services(LocalPlan(target_model="T", draft_model="D", device="cuda"), environment={}, cores=[0])


def test_a_target_that_drafts_itself_has_the_draft_its_settings_and_the_cores() -> None:
    target, coordinator = plan(placement="together", draft_settings={"num_siblings": 1, "weight_quantization": "int8"})
    assert (target.role, coordinator.role) == ("target", "coordinator")
    assert "--drafts=" in coordinator.arguments
    assert (target.environment["SPECDEC_TARGET_ENGINE_CORES"], coordinator.cores) == ("0,1,2", (3,))
    assert target.environment["SPECDEC_TARGET_NUM_THREADS"] == "3"
    settings = load_settings(TargetSettings, list(target.arguments), env_prefix=TargetSettings.env_prefix, prog="t")
    draft = settings.own_draft_settings
    assert draft is not None
    assert (draft.model, draft.num_siblings, draft.weight_quantization) == ("D", 1, "int8")
    assert draft.max_draft_tokens == settings.max_draft_tokens


def test_two_cores_or_less_are_shared_with_all_others() -> None:
    assert share_cores([3, 1]) == CoreAssignment((1, 3), (), (1, 3))
    assert share_cores([2]) == CoreAssignment((2,), (), (2,))
    with pytest.raises(ValueError, match="no cores"):
        share_cores([])


def test_a_target_runs_no_two_drafts() -> None:
    with pytest.raises(ClusterFailed, match="one draft"):
        plan(placement="together", num_drafts=2)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "own_draft"),
        ('{"model": "D", "bogus": 1}', "own_draft.*bogus"),
        ('{"num_threads": 1}', "model"),
        ('{"model": "D", "num_threads": 0}', "own_draft.*num_threads"),
        ('{"model": "D", "device": "cuda:1"}', "own_draft: device cuda:1"),
    ],
)
def test_what_is_wrong_with_a_draft_of_the_targets_own_is_named(value: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        TargetSettings(model="T", own_draft=value)  # type: ignore[arg-type]


def test_several_ranks_have_no_draft_of_their_own() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        TargetSettings(model="T", own_draft="D", tensor_parallel_size=2)  # type: ignore[arg-type]


def planned_draft(target: Path, draft: Path) -> ServiceSpec:
    plan = LocalPlan(target_model=str(target), draft_model=str(draft), device="cpu")
    (found,) = [spec for spec in plan_services(plan, environment={}) if spec.name == "draft"]
    return found


def test_a_draft_is_told_the_target_where_their_tokenizers_may_differ(tmp_path: Path) -> None:
    pair = shipped_pair()
    assert pair is not None
    other = with_another_tokenizer(pair / "draft", tmp_path / "draft")
    told = "--target=127.0.0.1:50052"
    assert told in planned_draft(pair / "target", other).arguments
    assert told in planned_draft(pair / "target", Path("an/id")).arguments
    assert told not in planned_draft(pair / "target", pair / "draft").arguments


def test_a_draft_with_a_model_may_have_a_target_and_drafters_must() -> None:
    settings = DraftSettings(model="M", target="host:1")
    assert settings.target == "host:1"
    assert (settings.heterogeneous_vocab, settings.parallel_drafting) == ("auto", None)
    with pytest.raises(ValidationError, match="drafters need a target"):
        DraftSettings(drafters="ngram")  # type: ignore[arg-type]


def test_a_setting_may_be_switched_off_also_of_a_draft_that_the_target_runs_itself() -> None:
    settings = parse_settings(["metrics_port=null", "speculate=true", "model=x"], "--draft-set")
    assert settings == {"metrics_port": None, "speculate": True, "model": "x"}
    assert json.loads(json.dumps(settings))["metrics_port"] is None


def test_a_second_cluster_finds_its_metrics_ports_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "port_is_free", lambda port: port != planning.METRICS_PORTS["target"])
    monkeypatch.setattr(planning, "free_port", lambda: 31_234)
    pair = shipped_pair()
    plan = LocalPlan(target_model=f"{pair}/target", draft_model=f"{pair}/draft")
    services = plan_services(plan, environment={}, cores=[0, 1, 2])
    told = {spec.role: spec.environment[f"SPECDEC_{spec.role.upper()}_METRICS_PORT"] for spec in services}
    assert told == {"target": "31234", "draft": "9093", "coordinator": "9090"}
