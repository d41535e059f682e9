"""Settings from flags, environment and files, and the errors that name them."""

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.config import (
    CoordinatorSettings,
    DraftSettings,
    TargetSettings,
    load_settings,
    settings_or_exit,
)
from specdec.config.retired import REMOVED, REPLACED
from specdec.config.sources import SettingsInvalid
from specdec.engine.settings import EngineSettings
from specdec.gateway.settings import GatewaySettings
from specdec.service.process import parse_cores, split_cores
from specdec.wire.settings import client_tls_paths
from tests.support.servers.certificates import Authority, SecretVolume


def load_target(*argv: str) -> TargetSettings:
    return load_settings(TargetSettings, argv, env_prefix="SPECDEC_TARGET_", prog="target")


def problems_of(*argv: str, cls: Any = TargetSettings) -> list[str]:
    with pytest.raises(SettingsInvalid) as caught:
        load_settings(cls, argv, env_prefix=cls.env_prefix, prog="test")
    return caught.value.problems


def test_target_settings_are_engine_settings_too() -> None:
    settings = load_target("--model", "m", "--num-threads", "2", "--dtype", "float32", "--device", "cpu")
    assert isinstance(settings, EngineSettings)
    assert (settings.model, settings.num_threads, settings.dtype) == ("m", 2, "float32")
    assert settings.served_name == "m"


def test_weights_of_drafts_and_targets_are_quantized_by_a_plain_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_target("--model", "m", "--weight-quantization", "int8").weight_quantization == "int8"
    monkeypatch.setenv("SPECDEC_DRAFT_WEIGHT_QUANTIZATION", "int4")
    draft = load_settings(DraftSettings, ["--model", "m"], env_prefix=DraftSettings.env_prefix, prog="draft")
    assert draft.weight_quantization == "int4"
    monkeypatch.setenv("SPECDEC_DRAFT_WEIGHT_QUANTIZATION", "int3")
    (problem,) = problems_of("--model", "m", cls=DraftSettings)
    assert "weight_quantization" in problem.replace("-", "_").lower()


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "target.yaml"
    config.write_text("model: from-file\nmax-sessions: 1\nnum_threads: 3\ndrain_s: 4\n")
    monkeypatch.setenv("SPECDEC_TARGET_CONFIG", str(config))
    monkeypatch.setenv("SPECDEC_TARGET_NUM_THREADS", "5")
    monkeypatch.setenv("SPECDEC_TARGET_DRAIN_S", "6")

    settings = load_target("--drain-s", "7")

    assert (settings.model, settings.max_sessions) == ("from-file", 1)
    assert (settings.num_threads, settings.drain_s) == (5, 7.0)
    assert settings.max_draft_tokens == 8


@pytest.mark.parametrize(
    ("name", "text"),
    [("c.toml", 'model = "m"\nreflection = false\n'), ("c.json", '{"model": "m", "reflection": false}')],
)
def test_other_file_formats_are_read(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    settings = load_target("--config", str(tmp_path / name))
    assert settings.model == "m"
    assert not settings.reflection


def test_missing_setting_is_named_with_all_its_spellings() -> None:
    assert problems_of() == ["model is required: set --model, SPECDEC_TARGET_MODEL"]


def test_all_bad_settings_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_TARGET_DTYPE", "int3")
    problems = problems_of("--model", "m", "--num-threads", "many", "--port", "70000")
    assert [problem.split(":")[0] for problem in problems] == ["dtype", "num_threads", "port"]
    assert all("SPECDEC_TARGET_" in problem for problem in problems)
    assert "'many'" in problems[1]


def test_unknown_flag_and_unknown_key_are_errors(tmp_path: Path) -> None:
    problem = "unrecognized arguments: --num-thread; did you mean --num-threads?"
    assert problems_of("--model", "m", "--num-thread=x") == [problem]
    config = tmp_path / "c.yaml"
    config.write_text("model: m\nmodle: x\n")
    assert problems_of("--config", str(config)) == ["modle is not a setting; did you mean model?"]


def test_a_misspelt_variable_is_an_error_that_names_the_nearest_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_TARGET_MAX_DRAFT_TOKEN", "4")
    monkeypatch.setenv("SPECDEC_TARGET_XYZZY", "")
    assert problems_of("--model", "m") == [
        "SPECDEC_TARGET_MAX_DRAFT_TOKEN is not a setting; did you mean SPECDEC_TARGET_MAX_DRAFT_TOKENS?",
        "SPECDEC_TARGET_XYZZY is not a setting",
    ]


def test_variables_of_other_services_and_commands_are_none_of_a_services_business(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SPECDEC_DRAFT_NUM_SIBLINGS", "SPECDEC_COORDINATOR_XYZZY", "SPECDEC_UP_DEVICE", "SPECDEC_API_KEY"):
        monkeypatch.setenv(name, "1")
    assert load_target("--model", "m").served_name == "m"


def test_every_setting_is_a_known_variable_in_either_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("specdec_target_max_sessions", "7")
    assert load_target("--model", "m").max_sessions == 7


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("none.yaml", None, "cannot read"),
        ("bad.yaml", "a: [", "does not parse"),
        ("list.yaml", "- a", "mapping"),
        ("c.ini", "", "none of"),
    ],
)
def test_file_that_cannot_be_used_is_named(tmp_path: Path, name: str, text: str | None, complaint: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    (problem,) = problems_of("--config", str(tmp_path / name))
    assert problem.startswith("config: ")
    assert complaint in problem


# What Kubernetes sets for Services named specdec-target and specdec-target-blue, with a port named grpc.
SERVICE_LINKS = {
    "SPECDEC_TARGET_PORT": "tcp://10.0.0.1:6000",
    "SPECDEC_TARGET_SERVICE_HOST": "10.0.0.1",
    "SPECDEC_TARGET_SERVICE_PORT": "6000",
    "SPECDEC_TARGET_SERVICE_PORT_GRPC": "6000",
    "SPECDEC_TARGET_PORT_6000_TCP": "tcp://10.0.0.1:6000",
    "SPECDEC_TARGET_PORT_6000_TCP_PROTO": "tcp",
    "SPECDEC_TARGET_PORT_6000_TCP_PORT": "6000",
    "SPECDEC_TARGET_PORT_6000_TCP_ADDR": "10.0.0.1",
    "SPECDEC_TARGET_BLUE_PORT": "tcp://10.0.0.2:6000",
    "SPECDEC_TARGET_BLUE_SERVICE_HOST": "10.0.0.2",
    "SPECDEC_TARGET_BLUE_SERVICE_PORT": "6000",
    "SPECDEC_TARGET_BLUE_SERVICE_PORT_GRPC": "6000",
    "SPECDEC_TARGET_BLUE_PORT_6000_TCP": "tcp://10.0.0.2:6000",
    "SPECDEC_TARGET_BLUE_PORT_6000_TCP_PROTO": "tcp",
    "SPECDEC_TARGET_BLUE_PORT_6000_TCP_PORT": "6000",
    "SPECDEC_TARGET_BLUE_PORT_6000_TCP_ADDR": "10.0.0.2",
}


def test_variables_that_kubernetes_makes_up_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SERVICE_LINKS.items():
        monkeypatch.setenv(name, value)
    assert load_target("--model", "m").port == 50052


def test_lists_are_comma_separated_in_flags_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_COORDINATOR_TARGETS", "a:1, b:2")
    settings = load_settings(
        CoordinatorSettings,
        ["--drafts", "c:3,d:4", "--drafts", "e:5"],
        env_prefix="SPECDEC_COORDINATOR_",
        prog="c",
    )
    assert settings.targets == ("a:1", "b:2")
    assert settings.drafts == ("c:3", "d:4", "e:5")


@pytest.mark.parametrize("bad", ["nonsense", "http://host:50052"])
def test_bad_address_in_a_list_is_shown(bad: str) -> None:
    (problem,) = problems_of("--targets", f"a:1,{bad}", cls=CoordinatorSettings)
    assert f"{bad!r} is not host:port" in problem
    assert "SPECDEC_COORDINATOR_TARGETS" in problem


def test_optional_settings_are_switched_off_by_null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_DRAFT_METRICS_PORT", "null")
    settings = load_settings(DraftSettings, ["--model", "m"], env_prefix="SPECDEC_DRAFT_", prog="d")
    assert settings.metrics_port is None


def test_secret_is_not_shown_by_repr() -> None:
    settings = CoordinatorSettings(targets=("a:1",), resume_secret="0123456789abcdef")  # type: ignore[arg-type]
    assert "0123456789" not in repr(settings)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--tls-cert-file", "/none"], "tls_cert_file and tls_key_file must be set together"),
        (["--tls-client-ca-file", "/none"], "tls_client_ca_file needs tls_cert_file"),
        (["--tls-cert-file", "/none", "--tls-key-file", "/none"], "tls_cert_file: no such file: /none"),
        (["--tls-dir", "/none"], "tls_dir: the folder /none has no file tls.crt"),
        (["--tls-dir", "/none", "--tls-key-file", "/x"], "tls_dir and tls_key_file: set one of them"),
        (["--tls-verify-clients"], "tls_verify_clients needs tls_dir"),
        (["--metrics-tls"], "metrics_tls needs tls_dir"),
        (["--redis-tls-dir", "/none"], "redis_tls_dir needs redis_url"),
        (["--redis-url=rediss://h:1", "--redis-tls-dir=/none"], "redis_tls_dir: the folder /none has no file ca.crt"),
        (["--engine-cores", "3-1"], "a falling range"),
        (["--engine-cores", "some"], "not auto, off or a list"),
    ],
)
def test_settings_that_do_not_fit_together_are_explained(argv: list[str], complaint: str) -> None:
    (problem,) = problems_of("--model", "m", *argv)
    assert complaint in problem


@pytest.mark.parametrize(
    ("side", "cls", "needed"),
    [
        ("replica_tls", CoordinatorSettings, ("--targets=a:1",)),
        ("replica_tls", DraftSettings, ("--model=m",)),
        ("redis_tls", CoordinatorSettings, ("--redis-url=rediss://127.0.0.1:1",)),
        ("coordinator_tls", GatewaySettings, ("--coordinators=a:1",)),
    ],
)
def test_a_clients_folder_needs_authorities_and_a_whole_pair_or_none(
    side: str, cls: Any, needed: tuple[str, ...], tmp_path: Path
) -> None:
    authority = Authority("ours")
    certificate = authority.issue("client")
    flag = f"--{side.replace('_', '-')}"
    arguments = (*needed, f"{flag}-dir={tmp_path}")

    def load() -> Any:
        return load_settings(cls, arguments, env_prefix=cls.env_prefix, prog="test")

    assert problems_of(*arguments, cls=cls) == [f"{side}_dir: the folder {tmp_path} has no file ca.crt"]
    (tmp_path / "ca.crt").write_bytes(authority.certificate)
    assert [file.path.name for file in client_tls_paths(load(), side)] == ["ca.crt"]
    (tmp_path / "tls.crt").write_bytes(certificate.chain)
    assert problems_of(*arguments, cls=cls) == [f"{side}_dir: the folder {tmp_path} has no file tls.key"]
    (tmp_path / "tls.key").write_bytes(certificate.key)
    assert [file.path.name for file in client_tls_paths(load(), side)] == ["tls.crt", "tls.key", "ca.crt"]
    (problem,) = problems_of(*arguments, f"{flag}-ca-file={tmp_path / 'ca.crt'}", cls=cls)
    assert problem == f"{side}_dir and {side}_ca_file: set one of them; {side}_dir replaces {side}_ca_file"
    if side != "redis_tls":
        assert getattr(load(), side)
        assert problems_of(*arguments, f"--no-{side.replace('_', '-')}", cls=cls) == [f"{side}_dir needs {side}"]


def test_a_replaced_setting_is_read_and_its_notice_names_the_new_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    volume = SecretVolume(tmp_path / "tls", Authority("ours").issue("target"), b"")
    old = [f"--tls-cert-file={volume.certificate}", f"--tls-key-file={volume.key}"]
    settings = settings_or_exit(
        TargetSettings, ["--model=m", *old], env_prefix=TargetSettings.env_prefix, prog="target"
    )
    assert settings.serves_tls
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["event"], line["level"], line["service"], line["setting"]) for line in told] == [
        ("setting_outdated", "warning", "target", "tls_cert_file"),
        ("setting_outdated", "warning", "target", "tls_key_file"),
    ]
    assert told[0]["reason"] == "tls_cert_file is read in this release only: set tls_dir instead"


@pytest.mark.parametrize("given", ["flag", "flag with a space", "variable", "file", "own draft"])
def test_a_removed_setting_is_ignored_and_its_notice_says_what_holds_now(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model=m", "--max-sessions=7"]
    match given:
        case "flag":
            argv += ["--session-ttl-s=5"]
        case "flag with a space":
            argv += ["--session-ttl-s", "5", "--port", "0"]
        case "variable":
            monkeypatch.setenv("SPECDEC_TARGET_SESSION_TTL_S", "5")
        case "own draft":
            argv += ['--own-draft={"model": "d", "session_ttl_s": 5}']
        case _:
            (tmp_path / "c.yaml").write_text("session-ttl-s: 5\n")
            argv += ["--config", str(tmp_path / "c.yaml")]
    settings = settings_or_exit(TargetSettings, argv, env_prefix=TargetSettings.env_prefix, prog="target")
    assert settings.max_sessions == 7
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert (told["event"], told["setting"]) == ("setting_outdated", "session_ttl_s")
    assert told["reason"] == (
        "session_ttl_s was removed and is ignored: a session outlives its coordinator's stream by 60 s"
    )


def test_a_removed_setting_of_another_service_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = problems_of("--model=m", "--ejection-s=1")
    assert "--ejection-s" in problem
    (problem,) = problems_of("--targets=a:1", "--session-ttl-s=1", cls=CoordinatorSettings)
    assert "--session-ttl-s" in problem
    monkeypatch.setenv("SPECDEC_GATEWAY_EJECTION_S", "1")
    (problem,) = problems_of(cls=GatewaySettings)
    assert problem.startswith("SPECDEC_GATEWAY_EJECTION_S is not a setting")


def test_no_setting_has_the_name_of_a_removed_one() -> None:
    kinds: tuple[Any, ...] = (TargetSettings, DraftSettings, CoordinatorSettings, GatewaySettings)
    assert not REMOVED.keys() & {name for kind in kinds for name in kind.model_fields}
    assert REPLACED.keys() <= {name for kind in kinds for name in kind.model_fields}


def test_help_and_hints_name_no_replaced_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_target("--help")
    _, _, options = capsys.readouterr().out.partition("\noptions:")
    assert "--tls-dir" in options
    assert not [name for name in REPLACED if f"--{name.replace('_', '-')} " in options]
    (problem,) = problems_of("--model=m", "--tls-cert-fle=x")
    assert "cert" not in problem.partition("did you mean")[2]


def test_process_exits_with_2_and_the_problem_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        settings_or_exit(TargetSettings, ["--port", "x"], env_prefix="SPECDEC_TARGET_", prog="specdec target")
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("specdec target: model is required")
    assert lines[1].startswith("specdec target: port: ")


def test_settings_survive_the_way_to_the_engine_process() -> None:
    settings = load_target("--model", "m", "--engine-cores", "0-1")
    assert TargetSettings.model_validate_json(settings.model_dump_json()) == settings


@pytest.mark.parametrize(
    ("setting", "available", "engine", "servicer"),
    [
        ("off", range(4), None, None),
        ("auto", [2], None, None),
        ("auto", range(4), {1, 2, 3}, {0}),
        ("auto", range(16), set(range(2, 16)), {0, 1}),
        ("1-2", range(4), {1, 2}, {0, 3}),
        ("0,1", range(2), {0, 1}, None),
    ],
)
def test_cores_are_split_between_engine_and_servicer(
    setting: str, available: list[int], engine: set[int] | None, servicer: set[int] | None
) -> None:
    assert split_cores(setting, available) == (engine, servicer)


def test_core_that_the_process_may_not_use_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"engine_cores: \[9\]"):
        split_cores("1,9", range(4))
    assert parse_cores("0-2,5") == {0, 1, 2, 5}


def test_several_processes_need_a_store_to_find_duplicate_requests_in() -> None:
    (problem,) = problems_of("--targets", "a:1", "--num-processes", "2", cls=CoordinatorSettings)
    assert problem.startswith("num_processes above 1 needs redis_url")


def test_a_name_for_several_processes_leaves_room_for_their_numbers() -> None:
    arguments = ["--targets=a:1", "--redis-url=redis://127.0.0.1:1", f"--owner-id={'x' * 62}"]
    (problem,) = problems_of(*arguments, "--num-processes=64", cls=CoordinatorSettings)
    assert "owner_id must be at most 61 characters" in problem
    assert len(load_settings(CoordinatorSettings, arguments, env_prefix="T_", prog="test").owner_id or "") == 62


@pytest.mark.parametrize(
    "arguments",
    [
        ("--resume-secret", "hunter2"),
        ("--redis-pasword", "hunter2"),
        ("--redis-pasword=hunter2",),
        ("--redis-url", "hunter2"),
        ("--redis-url", "redis://u:hunter2@h:port"),
        ("--otlp-headers", "hunter2", "--otlp-endpoint", "http://c:1"),
        ("--otlp-endpoint", "http://u:hunter2@c:1"),
    ],
)
def test_what_is_wrong_with_a_secret_is_told_without_it(arguments: tuple[str, ...]) -> None:
    (problem,) = problems_of("--targets", "a:1", *arguments, cls=CoordinatorSettings)
    assert "hunter2" not in problem
    assert arguments[0].partition("=")[0].lstrip("-").replace("-", "_") in problem.replace("-", "_")


@pytest.mark.parametrize(
    "text",
    [
        "redis_password: hunter2: x",
        "redis_password: [hunter2]",
        "redis_password: *hunter2",
        "redis_password: !hunter2",
        'redis_password: "\\zhunter2"',
        "redis_url: {a: hunter2}\nredis_password: [",
        "resume_secret: hunter2",
    ],
)
def test_a_file_with_a_secret_that_cannot_be_used_is_not_quoted(tmp_path: Path, text: str) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"targets: a:1\n{text}\n")
    problems = problems_of("--config", str(config), cls=CoordinatorSettings)
    assert "hunter2" not in "".join(problems)


def test_an_ipv6_address_needs_brackets() -> None:
    (problem,) = problems_of("--targets", "::1:50052", cls=CoordinatorSettings)
    assert "'::1:50052': an IPv6 address is written in brackets" in problem
    settings = load_settings(
        CoordinatorSettings, ["--targets", "[::1]:50052,dns:///targets:50052"], env_prefix="SPECDEC_", prog="test"
    )
    assert settings.targets == ("[::1]:50052", "dns:///targets:50052")
