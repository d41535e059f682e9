"""The `specdec` command against a coordinator without models."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import grpc
import pytest
from click.testing import Result
from typer.testing import CliRunner

import specdec
from specdec.commands.app import app
from specdec.commands.field_flags import field_flags
from specdec.v1 import common_pb2, coordinator_pb2
from tests.support.for_each import for_each
from tests.support.services.fake_coordinator import TEXT, FakeCoordinator, running_fake_coordinator


class Command:
    """Runs `specdec` against a fake coordinator."""

    def __init__(self, servicer: FakeCoordinator, address: str) -> None:
        self.servicer, self.address = servicer, address

    def __call__(self, *arguments: str, stdin: str | None = None, env: dict[str, str] | None = None) -> Result:
        environment = {"SPECDEC_ADDRESS": self.address, "COLUMNS": "120", **(env or {})}
        return CliRunner().invoke(app, list(arguments), input=stdin, env=environment)

    @property
    def request(self) -> coordinator_pb2.GenerateRequest:
        return self.servicer.requests[-1]


@pytest.fixture
def command() -> Iterator[Command]:
    with running_fake_coordinator() as (servicer, address):
        yield Command(servicer, address)


def test_text_goes_to_standard_output_and_statistics_to_standard_error(command: Command) -> None:
    result = command("generate", "def fib(n):")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == TEXT + "\n"
    assert "acceptance length" in result.stderr
    assert "4 of 6 verified (67%)" in result.stderr
    assert "a limit" in result.stderr


def test_every_sampling_parameter_has_a_flag(command: Command) -> None:
    flags = "--temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1 --presence-penalty 0.2"
    flags += " --frequency-penalty 0.3 --logit-bias 5=1.5 --logit-bias 6=-100 --seed 18446744073709551615"
    flags += " --max-tokens 9 --min-tokens 2 --stop END --stop ; --include-stop --stop-token-id 7 --ignore-eos -n 2"
    flags += " --allowed-token-id 4 --allowed-token-id 3 --bad-word no --bad-word never --regex [ab]+"
    flags += " --logprobs 0 --prompt-logprobs 1 --no-skip-special-tokens --truncate-prompt-tokens 64"
    result = command("generate", "x", *flags.split())
    assert result.exit_code == 0, result.stderr
    expected = coordinator_pb2.SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={5: 1.5, 6: -100},
        seed=2**64 - 1,
        max_tokens=9,
        min_tokens=2,
        stop=["END", ";"],
        include_stop_in_output=True,
        stop_token_ids=[7],
        ignore_eos=True,
        n=2,
        logprobs=0,
        prompt_logprobs=1,
        skip_special_tokens=False,
        truncate_prompt_tokens=64,
        allowed_token_ids=[4, 3],
        bad_words=["no", "never"],
        constraint=common_pb2.Constraint(regex="[ab]+"),
    )
    assert command.request.sampling == expected
    filled = {field.name for field, _ in command.request.sampling.ListFields()}
    assert filled == set(coordinator_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


def test_every_field_of_a_request_that_is_no_message_has_a_flag_and_a_help_text(command: Command) -> None:
    flags = "--model big --request-id mine --priority -3 --cache-salt s --time-per-token-ms 2.5 --drafters ngram,suffix"
    flags += " --rejection-sample-method block --verify-mode coupled --speculation --max-draft-tokens 4"
    result = command("generate", "x", *flags.split())
    assert result.exit_code == 0, result.stderr
    request = command.request
    assert (request.model, request.request_id, request.priority, request.cache_salt) == ("big", "mine", -3, "s")
    assert request.speculation == coordinator_pb2.SpeculationParams(
        enabled=True,
        verify_mode=common_pb2.VERIFY_MODE_COUPLED,
        rejection_sample_method=common_pb2.REJECTION_SAMPLE_METHOD_BLOCK,
        max_draft_tokens=4,
        time_per_token_ms=2.5,
        drafters=["ngram", "suffix"],
    )
    filled = {field.name for field, _ in request.speculation.ListFields()}
    assert filled == set(coordinator_pb2.SpeculationParams.DESCRIPTOR.fields_by_name)
    for flag in field_flags().values():
        option = get_args(flag.as_parameter().annotation)[1]
        assert re.fullmatch(r"[A-Z0-9].{10,}\.", option.help), flag


def test_what_the_output_must_be_is_given_in_one_of_four_forms(command: Command, tmp_path: Path) -> None:
    (tmp_path / "form").write_text("{}")
    file = str(tmp_path / "form")
    forms = {
        ("--json-schema-file", file): common_pb2.Constraint(json_schema="{}"),
        ("--grammar-file", file): common_pb2.Constraint(grammar="{}"),
        ("--choice", "a", "--choice", "b"): common_pb2.Constraint(choice=common_pb2.TextChoices(texts=["a", "b"])),
    }
    for flags, constraint in forms.items():
        assert command("generate", "x", *flags).exit_code == 0
        assert command.request.sampling.constraint == constraint
    assert "give one of" in command("generate", "x", "--regex", "a", "--choice", "b").stderr
    assert "cannot read" in command("generate", "x", "--grammar-file", f"{file}.not").stderr


def test_a_flag_not_given_is_left_to_the_server(command: Command) -> None:
    command("generate", "x")
    assert command.request.sampling == coordinator_pb2.SamplingParams()
    assert command.request.speculation == coordinator_pb2.SpeculationParams()


def test_zero_is_sent_where_zero_is_meant(command: Command) -> None:
    command("generate", "x", "--temperature", "0", "--max-draft-tokens", "0")
    assert command.request.sampling.HasField("temperature")
    assert command.request.speculation.HasField("max_draft_tokens")


def test_speculation_can_be_switched_and_its_verification_chosen(command: Command) -> None:
    command("generate", "x", "--no-speculation", "--verify-mode", "rejection", "--max-draft-tokens", "4")
    assert command.request.speculation == coordinator_pb2.SpeculationParams(
        enabled=False, verify_mode=common_pb2.VERIFY_MODE_REJECTION, max_draft_tokens=4
    )


def test_the_prompt_may_come_from_a_file_or_standard_input(command: Command, tmp_path: Path) -> None:
    (tmp_path / "p").write_text("from a file\n")
    command("generate", "--prompt-file", str(tmp_path / "p"))
    assert command.request.prompt == "from a file\n"
    command("generate", stdin="piped")
    assert command.request.prompt == "piped"
    command("generate", "--prompt-file", "-", stdin="dashed")
    assert command.request.prompt == "dashed"


def test_the_prompt_may_be_token_ids_or_messages(command: Command) -> None:
    command("generate", "--token-ids", "1, 2,3")
    assert list(command.request.prompt_token_ids.token_ids) == [1, 2, 3]
    command("generate", "--message", "system: Be brief.", "--message", "user:a:b")
    messages = [(message.role, message.content) for message in command.request.messages.messages]
    assert messages == [("system", "Be brief."), ("user", "a:b")]


@for_each(
    "arguments, named",
    [
        (["x", "--token-ids", "1"], "--token-ids"),
        (["--token-ids", "1,x"], "'x' is not a token id"),
        (["--token-ids", "1,-2"], "'-2' is not a token id"),
        (["--token-ids", "4294967296"], "'4294967296' is not a token id"),
        (["--message", "no role"], "ROLE:CONTENT"),
        (["x", "--logit-bias", "5"], "ID=BIAS"),
        (["x", "--verify-mode", "hope"], "--verify-mode"),
        (["x", "--top-k", "-1"], "--top-k: -1 is outside 0..4294967295"),
        (["x", "--json", "--compare"], "--compare"),
        (["--prompt-file", "/nowhere/p"], "/nowhere/p"),
        (["x", "--tls-key", "k"], "--tls-cert"),
        (["x", "--tls-ca", __file__], "--tls-ca: not usable PEM"),
        (["x", "--tls-key", __file__, "--tls-cert", __file__], "--tls-cert, --tls-key: not usable PEM"),
        (["x", "--priority", "99999999999"], "--priority"),
        (["x", "--stop-token-id", "-1"], "Invalid value for --stop-token-id"),
        (["x", "--logit-bias", "-1=2"], "Invalid value for --logit-bias"),
        (["x", "--address", "localhost"], "'localhost' is not HOST:PORT"),
        (["x", "--address", "localhost:99999"], "'localhost:99999' is not HOST:PORT"),
        (["x", "--address", "http://localhost:80"], "'http://localhost:80' is not HOST:PORT"),
    ],
)
def test_a_malformed_flag_is_named_and_nothing_is_sent(command: Command, arguments: list[str], named: str) -> None:
    result = command("generate", *arguments)
    assert result.exit_code == 2
    assert named in result.stderr
    assert command.servicer.requests == []


@pytest.mark.parametrize(
    ("arguments", "exit_code", "lines"),
    [
        (["x", "--temperature", "3"], 2, ["INVALID_ARGUMENT", "sampling.temperature: must be in [0, 2]"]),
        (["x", "--model", "missing"], 3, ["NOT_FOUND (MODEL_NOT_FOUND)", "model 'missing' is not served"]),
        (["overload"], 5, ["RESOURCE_EXHAUSTED (OVERLOADED)", "try again in 2.5 s"]),
        (
            ["x", "--address", "127.0.0.1:1"],
            6,
            ["UNAVAILABLE", "cannot connect to 127.0.0.1:1: no server listens there"],
        ),
    ],
)
def test_a_servers_error_is_told_with_its_field_and_code(
    command: Command, arguments: list[str], exit_code: int, lines: list[str]
) -> None:
    result = command("generate", *arguments)
    assert result.exit_code == exit_code
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    for line in lines:
        assert line in result.stderr


def test_a_server_that_is_starting_is_tried_again(command: Command) -> None:
    command.servicer.unavailable_times = 2
    result = command("generate", "x")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == TEXT + "\n"
    assert len(command.servicer.requests) == 3


def test_origins_are_coloured_and_explained(command: Command) -> None:
    result = command("generate", "x", "--show-origin", env={"FORCE_COLOR": "1"})
    assert "\x1b[31m 2\x1b[0m" in result.stdout
    assert "accepted" in result.stderr


def test_compare_runs_the_same_seed_plainly_and_finds_equal_tokens(command: Command) -> None:
    result = command("generate", "x", "--compare", "--request-id", "mine")
    assert result.exit_code == 0, result.stderr
    speculative, plain = command.servicer.requests
    assert not speculative.sampling.HasField("seed")
    assert plain.sampling.seed == 4711
    assert plain.speculation.HasField("enabled")
    assert not plain.speculation.enabled
    assert plain.request_id == ""
    assert "All 9 tokens are equal." in result.stderr


def test_compare_tells_where_tokens_differ(command: Command) -> None:
    command.servicer.plain_differs = True
    result = command("generate", "x", "--compare")
    assert "The tokens differ: choice 0 from output token 4 on." in result.stderr


def test_compare_promises_no_equality_for_sampled_rejection(command: Command) -> None:
    command.servicer.plain_differs = True
    result = command("generate", "x", "--compare", "--verify-mode", "rejection")
    assert "keeps the distribution" in result.stderr
    assert "differ" not in result.stderr


def test_choices_are_shown_one_after_the_other(command: Command) -> None:
    result = command("generate", "x", "-n", "2")
    assert result.stdout == f"{TEXT}\n--- choice 1\n{TEXT}\n"


def test_json_prints_every_chunk_as_a_line(command: Command) -> None:
    result = command("generate", "x", "--json")
    kinds = [next(iter(json.loads(line))) for line in result.stdout.splitlines()]
    assert kinds == ["started", *["delta"] * 9, "choice_finished", "finished"]


def test_logprobs_are_shown_when_asked_for(command: Command) -> None:
    result = command("generate", "x", "--logprobs", "1", "--prompt-logprobs", "0")
    rows = [line.split() for line in result.stderr.splitlines()]
    assert ["31"] in rows
    assert ["32", "-1.500"] in rows
    assert ["33", "-2.500"] in rows
    assert "-0.250" in result.stderr


def test_flags_win_over_environment_over_file_over_default(command: Command, tmp_path: Path) -> None:
    config = tmp_path / "specdec.yaml"
    config.write_text("generate:\n  temperature: 0.1\n  top-k: 10\n  max_tokens: 100\n")
    environment = {"SPECDEC_GENERATE_TOP_K": "20", "SPECDEC_GENERATE_MAX_TOKENS": "200"}
    result = command("--config", str(config), "generate", "x", "--max-tokens", "300", env=environment)
    assert result.exit_code == 0, result.stderr
    assert command.request.sampling == coordinator_pb2.SamplingParams(temperature=0.1, top_k=20, max_tokens=300)


def test_the_file_may_be_toml_and_named_by_the_environment(command: Command, tmp_path: Path) -> None:
    config = tmp_path / "specdec.toml"
    config.write_text("[generate]\nseed = 7\n")
    command("generate", "x", env={"SPECDEC_CONFIG": str(config)})
    assert command.request.sampling.seed == 7


def test_a_misspelt_flag_in_the_file_is_refused_and_the_nearest_one_named(command: Command, tmp_path: Path) -> None:
    config = tmp_path / "specdec.yaml"
    config.write_text("generate:\n  temprature: 0.1\n")
    result = command("--config", str(config), "generate", "x")
    assert result.exit_code == 2
    # The message is in a box, where a long path breaks it.
    told = " ".join(result.stderr.replace("│", " ").split())
    assert "temprature is not a flag of generate; did you mean temperature?" in told
    assert command.servicer.requests == []


@pytest.mark.parametrize("content", ["nonsense: {}", "generate: 3", "{"])
def test_a_bad_file_is_refused(command: Command, tmp_path: Path, content: str) -> None:
    config = tmp_path / "specdec.yaml"
    config.write_text(content)
    result = command("--config", str(config), "generate", "x")
    assert result.exit_code == 2
    assert "--config" in result.stderr


def test_models_shows_what_is_loaded_where(command: Command) -> None:
    result = command("models")
    assert result.exit_code == 0, result.stderr
    for text in (
        "big",
        "0 requests run, of at most 64 choices",
        "15.8M",
        "127.0.0.1:50052",
        "ready",
        "down",
        "[refused]",
        "coupled",
        "10.0.0.9:50051",
        "degraded: Redis does not answer [or hangs]",
    ):
        assert text in result.stdout


def test_models_can_be_read_by_programs(command: Command) -> None:
    info, status = map(json.loads, command("models", "--json").stdout.splitlines())
    assert info["target"]["name"] == "big"
    assert status["replicas"][1]["state"] == "down"


@pytest.mark.parametrize("name", ["models", "generate"])
def test_the_variable_of_the_json_flag_is_named_after_the_flag(command: Command, name: str) -> None:
    result = command(name, *(["x"] if name == "generate" else []), env={f"SPECDEC_{name.upper()}_JSON": "1"})
    assert all(json.loads(line) for line in result.stdout.splitlines())


def test_health_says_what_is_wrong_with_the_connection(command: Command) -> None:
    result = command("health", "--address", "127.0.0.1:1")
    assert result.exit_code == 6
    assert result.stderr == "127.0.0.1:1: UNAVAILABLE: no server listens there\n"


def test_another_service_at_the_address_is_told_apart_from_a_coordinator(command: Command) -> None:
    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    result = command("models", "--address", address)
    server.stop(None).wait()
    assert result.exit_code == 1
    assert f"{address} does not know the call: the service there is no coordinator" in result.stderr


@pytest.mark.parametrize("role", ["target", "draft", "coordinator"])
def test_a_services_own_messages_name_the_command_that_was_typed(role: str) -> None:
    arguments = [sys.executable, "-m", "specdec.commands.main", "serve", role, "--no-such-flag"]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith(f"specdec serve {role}: unrecognized arguments: --no-such-flag")


@pytest.mark.parametrize("arguments", [["up", "--help"], ["demo", "--help"]])
def test_help_tells_the_defaults_that_are_no_values(command: Command, arguments: list[str]) -> None:
    assert "default: the shipped one" in " ".join(command(*arguments).stdout.split())


@pytest.mark.parametrize("role", ["target", "draft", "coordinator"])
def test_help_names_values_in_words_and_not_by_types(role: str) -> None:
    arguments = [sys.executable, "-m", "specdec.commands.main", "serve", role, "--help"]
    shown = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    flags = re.findall(r"^  (--[a-z-]+) (\S+)", shown, re.MULTILINE)
    assert len(flags) > 20
    assert {value for _, value in flags if not value.startswith(("{", "--"))} <= {
        "INTEGER",
        "JSON",
        "LIST",
        "NUMBER",
        "PATH",
        "SECRET",
        "TEXT",
    }


def test_serve_refuses_unknown_services(command: Command) -> None:
    result = command("serve", "oracle")
    assert result.exit_code == 2
    assert "target, draft, coordinator" in result.stderr


def test_up_names_a_setting_that_is_malformed(command: Command) -> None:
    result = command("up", "--target-set", "num_threads")
    assert result.exit_code == 2
    assert "NAME=VALUE" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(("--target", ""), "is empty"), (("--draft", ""), "is empty"), (("--log-dir", "/proc/logs"), "cannot write")],
    ids=str,
)
def test_up_names_a_flag_without_a_name_and_a_folder_that_cannot_be(
    command: Command, arguments: tuple[str, ...], told: str
) -> None:
    result = command("up", *arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.stderr
    assert told in result.stderr


def test_a_demo_chat_needs_a_model_that_can_chat(command: Command) -> None:
    result = command("demo", "--chat")
    assert result.exit_code == 1
    assert "--chat needs --target: the shipped pair cannot chat" in " ".join(result.stderr.split())


def test_version_is_the_packages(command: Command) -> None:
    assert command("--version").stdout == f"specdec {specdec.__version__}\n"
