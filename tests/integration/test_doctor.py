"""`specdec doctor` of a real cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdec.commands.app import app
from specdec.commands.up.cluster import Cluster
from specdec.commands.up.plan import shipped_model

pytestmark = pytest.mark.integration


def test_a_deployment_is_measured_and_every_line_has_its_figures(tiny_cluster: Cluster, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("[5, 6, 7, 8]\n[40, 41, 42, 43, 44]\n")
    arguments = ["--address", tiny_cluster.address, "--prompts", str(prompts), "--max-tokens", "32", "--json"]
    result = CliRunner().invoke(app, ["doctor", *arguments, "--concurrency", "2"])
    assert result.exit_code == 0, result.output
    found = {line["what"]: line for line in json.loads(result.stdout)}
    assert found["tokenizers are equal by content"]["outcome"] == "pass"
    assert found["replicas are ready"]["outcome"] == "pass"
    assert "by depth" in found["draft tokens are accepted, temperature 1"]["measured"]
    assert "times plain decoding" in found["speculation is not slower at 2 requests at once"]["measured"]
    for what in ("stop strings", "log-probabilities"):
        line = found[f"with {what} greedy output is the same with and without speculation"]
        assert line["outcome"] == "pass", line
    assert all(line["do"] for line in found.values() if line["outcome"] != "pass")
    assert all(line["measured"] for line in found.values())


def test_a_settings_file_with_a_fault_has_exit_code_1(tmp_path: Path) -> None:
    file = tmp_path / "up.yaml"
    file.write_text("up:\n  target-set: [max_draft_tokens=many]\n")
    result = CliRunner().invoke(app, ["doctor", "--settings", str(file)])
    assert result.exit_code == 1
    assert "fail settings of the target are valid" in result.stdout


def test_heads_are_tried_with_the_layers_beside_theirs(tmp_path: Path) -> None:
    head = {"method": "eagle3", "model": shipped_model("eagle3")}
    file = tmp_path / "up.yaml"
    file.write_text(json.dumps({"up": {"target-set": [f"drafters={json.dumps([head])}"]}}))
    result = CliRunner().invoke(app, ["doctor", "--settings", str(file), "--try-heads", "--json"])
    assert result.exit_code == 0, result.output
    found = {line["what"]: line for line in json.loads(result.stdout)}
    line = found["eagle3 reads the layers that it was trained on"]
    assert line["outcome"] == "pass", line
    assert line["measured"].count("%") == 5
    assert "with 2, 5, 9" in line["measured"]


def test_what_runs_is_not_loaded_again_to_try_its_heads() -> None:
    result = CliRunner().invoke(app, ["doctor", "--try-heads"])
    assert result.exit_code == 2
    assert "needs --settings" in result.output
