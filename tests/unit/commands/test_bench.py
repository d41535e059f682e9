"""`specdec bench` against a coordinator without models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from specdec.commands.app import app
from specdec.commands.up.cluster import free_port
from tests.support.for_each import for_each
from tests.support.services.fake_coordinator import FakeCoordinator, running_fake_coordinator

QUICK = ("--concurrency", "1,2", "--requests", "3", "--repeats", "2")


@pytest.fixture
def coordinator() -> Iterator[tuple[FakeCoordinator, str]]:
    with running_fake_coordinator() as (servicer, address):
        servicer.has_draft = True
        yield servicer, address


def bench(address: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "--address", address, *arguments], env={"COLUMNS": "120"})


def test_runs_with_and_without_speculation_alternate_and_are_reported(
    coordinator: tuple[FakeCoordinator, str], tmp_path: Path
) -> None:
    servicer, address = coordinator
    result = bench(address, *QUICK, "--report", str(tmp_path / "new" / "folder"))
    assert result.exit_code == 0, result.stderr
    asked = [request.speculation.enabled for request in servicer.requests[2:]]  # after those that warm up
    assert asked[:6] == [True] * 3 + [False] * 3  # one at once
    assert asked[6:12] == [False] * 3 + [True] * 3  # two at once
    assert len(asked) == 30
    told = [request.with_steps for request in servicer.requests[2:]]
    assert told == [False] * 24 + [True] * 6
    assert asked[24:] == [True] * 6
    found = json.loads((tmp_path / "new/folder/specdec-bench.json").read_text())
    assert [(row["load"], row["speculation"]) for row in found["bench"]] == [
        ("1 at once", True), ("1 at once", False), ("2 at once", True), ("2 at once", False)
    ]  # fmt: skip
    assert found["bench"][0]["speedup"]["median"] > 0
    assert "English" in found["prompts"] and not found["interrupted"]
    page = (tmp_path / "new/folder/specdec-bench.md").read_text()
    for picture in (tmp_path / "new/folder").glob("*.svg"):
        assert picture.name in page
    assert "Speed, temperature 0" in result.stdout


def test_steps_are_asked_for_by_nobody_where_no_breakdown_is_wanted(
    coordinator: tuple[FakeCoordinator, str],
) -> None:
    result = bench(coordinator[1], *QUICK, "--no-breakdown")
    assert result.exit_code == 0, result.stderr
    assert len(coordinator[0].requests) == 2 + 24
    assert not any(request.with_steps for request in coordinator[0].requests)


def test_kinds_of_prompts_are_told_apart(coordinator: tuple[FakeCoordinator, str], tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "one", "kind": "prose"}\n{"prompt": "two", "kind": "code"}\n')
    result = bench(coordinator[1], "--prompts", str(file), "--concurrency", "1", "--report", str(tmp_path / "out"))
    assert result.exit_code == 0, result.stderr
    assert "Acceptance by kind of prompt" in result.stdout
    found = json.loads((tmp_path / "out/specdec-bench.json").read_text())["breakdown"]
    assert [(row["kind"], row["num_requests"]) for row in found["by_kind"]] == [("prose", 6), ("code", 6)]
    assert (tmp_path / "out/specdec-bench-acceptance-kind.svg").exists()


def test_drafters_of_the_targets_own_are_measured_where_there_is_no_draft(
    coordinator: tuple[FakeCoordinator, str],
) -> None:
    coordinator[0].has_draft, coordinator[0].drafters = False, ["ngram"]
    result = bench(coordinator[1], *QUICK)
    assert result.exit_code == 0, result.stderr
    assert "No draft is connected" not in result.stderr
    assert any(request.speculation.enabled for request in coordinator[0].requests)


def test_requests_come_at_a_rate(coordinator: tuple[FakeCoordinator, str]) -> None:
    result = bench(coordinator[1], "--rate", "20", "--seconds", "0.3", "--repeats", "1", "--speculation", "on")
    assert result.exit_code == 0, result.stderr
    assert "20 requests/s" in result.stdout
    assert all(request.speculation.enabled for request in coordinator[0].requests)


def test_without_a_draft_plain_decoding_alone_is_measured(coordinator: tuple[FakeCoordinator, str]) -> None:
    coordinator[0].has_draft = False
    result = bench(coordinator[1], *QUICK)
    assert result.exit_code == 0, result.stderr
    assert "No draft is connected" in result.stderr
    assert not any(request.speculation.enabled for request in coordinator[0].requests)


def test_prompts_of_a_file_are_asked_in_turns(coordinator: tuple[FakeCoordinator, str], tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "one"}\n{"token_ids": [5, 6]}\n')
    result = bench(coordinator[1], "--prompts", str(file), "--concurrency", "1", "--requests", "3", "--repeats", "1")
    assert result.exit_code == 0, result.stderr
    texts = [request.prompt or list(request.prompt_token_ids.token_ids) for request in coordinator[0].requests[2:5]]
    assert texts == ["one", [5, 6], "one"]


def test_requests_that_fail_are_named_and_the_rest_is_measured(
    coordinator: tuple[FakeCoordinator, str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("fine\noverload\n")
    result = bench(coordinator[1], "--prompts", str(file), "--concurrency", "2", "--repeats", "1")
    assert result.exit_code == 0, result.stderr
    assert "RESOURCE_EXHAUSTED (OVERLOADED)" in result.stdout


@for_each(
    "arguments, code, words",
    [
        (("--model", "missing"), 3, "MODEL_NOT_FOUND"),
        (("--temperature", "3"), 2, "must be in [0, 2]"),
        (("--temperature", "-1"), 2, "greater than or equal to"),
        (("--concurrency", "0"), 2, "whole numbers from 1"),
        (("--concurrency", "-4"), 2, "whole numbers from 1"),
        (("--concurrency", "many"), 2, "not a comma-separated list"),
        (("--rate", "-2"), 2, "above 0"),
        (("--rate", "nan"), 2, "must be finite numbers"),
        (("--rate", "1e9"), 2, "more than 100000 requests"),
        (("--rate", "1", "--seconds", "inf"), 2, "more than 100000 requests"),
        (("--concurrency", ""), 2, "must be finite numbers"),
        (("--concurrency", "1000000"), 2, "more than 100000 requests"),
        (("--concurrency", "1,8", "--requests", "7"), 2, "7 is below --concurrency 8"),
        (("--temperature", "nan"), 2, "--temperature"),
        (("--timeout-s", "inf"), 2, "--timeout-s"),
        (("--max-tokens", "1000000000000"), 2, "--max-tokens"),
        (("--max-draft-tokens", "1000000000000"), 2, "--max-draft-tokens"),
        (("--rate", "1", "--concurrency", "1"), 2, "exclude each other"),
        (("--max-tokens", "-3"), 2, "greater than or equal to"),
        (("--prompts", "/no/such/file"), 2, "No such file"),
        (("--speculation", "maybe"), 2, "maybe"),
        (("--repeats", "1", "--concurrency", "1", "--requests", "1", "--report", "/proc/nowhere"), 2, "cannot write"),
    ],
)
def test_what_is_wrong_is_said_in_a_few_words(
    coordinator: tuple[FakeCoordinator, str], arguments: tuple[str, ...], code: int, words: str
) -> None:
    result = bench(coordinator[1], *arguments)
    assert result.exit_code == code, result.output
    assert words in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.output


def test_an_address_where_nothing_listens_is_named() -> None:
    address = f"127.0.0.1:{free_port()}"
    result = bench(address)
    assert result.exit_code == 6
    assert f"cannot connect to {address}: no server listens there" in result.stderr
