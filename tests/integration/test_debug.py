"""`specdec debug` of a real cluster, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from specdec.commands.app import app
from specdec.commands.up.cluster import Cluster

pytestmark = pytest.mark.integration


def debug(cluster: Cluster, *arguments: str) -> Result:
    command = ["debug", "--address", cluster.address, *arguments]
    return CliRunner().invoke(app, command, env={"COLUMNS": "160"})


def test_every_token_is_of_a_step_and_the_record_can_be_run_again(tiny_cluster: Cluster, tmp_path: Path) -> None:
    page, record, again = tmp_path / "page.html", tmp_path / "record.json", tmp_path / "again.json"
    sampling = ("--max-tokens", "24", "--temperature", "0.8", "--ignore-eos")
    files = ("--html", str(page), "--json", str(record))
    result = debug(tiny_cluster, "--token-ids", "5,6,7,8", *sampling, *files)
    assert result.exit_code == 0, result.stderr
    assert "step 1" in result.stdout and "Where the time went" in result.stdout
    told = json.loads(record.read_text())
    tokens = [token["token_id"] for step in told["steps"] for token in step["tokens"]]
    assert len(tokens) == 24
    nodes = [node for step in told["steps"] for node in step["nodes"]]
    assert {node["state"] for node in nodes} >= {"accepted"}
    assert all(node["target_prob"] is not None for node in nodes if node["state"] != "unverified")
    assert page.read_text().count("<details") == len(told["steps"])

    repeated = debug(tiny_cluster, "--request", str(record), "--json", str(again), "--steps", "1")
    assert repeated.exit_code == 0, repeated.stderr
    assert "more steps" in repeated.stdout
    same = json.loads(again.read_text())
    assert [token["token_id"] for step in same["steps"] for token in step["tokens"]] == tokens


def test_a_file_that_holds_no_request_is_refused(tiny_cluster: Cluster, tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"request": {"temperature": 1}}')
    result = debug(tiny_cluster, "--request", str(broken))
    assert result.exit_code == 2
    assert "holds no request" in result.stderr


def test_where_nothing_can_be_written_nothing_is_asked(tmp_path: Path) -> None:
    page = tmp_path / "missing" / "page.html"
    result = CliRunner().invoke(app, ["debug", "--address", "127.0.0.1:1", "--html", str(page), "x"])
    assert result.exit_code == 2
    assert "there is no folder" in " ".join(result.stderr.replace("│", " ").split())
