"""`specdec audit` of real services: a coordinator, and a gateway as anybody's OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from specdec.commands.app import app
from specdec.commands.up.cluster import Cluster
from tests.support.services.gateways import gateway
from tests.support.services.model_pair import ModelPair

pytestmark = pytest.mark.integration

SMALL = ("--num-prompts", "2", "--max-tokens", "24", "--samples", "64", "--sampled-tokens", "4")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("[5, 6, 7, 8]\n[40, 41, 42, 43, 44]\n")
    return file


def audit(target: Path, prompts: Path, *arguments: str) -> Result:
    command = ["audit", "--target", str(target), "--prompts", str(prompts), *SMALL, *arguments]
    return CliRunner().invoke(app, command, env={"COLUMNS": "160"})


def test_a_coordinator_is_what_its_model_is(
    tiny_cluster: Cluster, tiny_pair: ModelPair, prompts: Path, tmp_path: Path
) -> None:
    result = audit(tiny_pair.target, prompts, "--address", tiny_cluster.address, "--report", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    told = json.loads((tmp_path / "out" / "specdec-audit.json").read_text())
    assert told["audit"]["is_lossless"] and told["audit"]["speculated"]
    assert told["audit"]["greedy"]["num_tokens"] == 48
    assert told["audit"]["num_repeated"] > 0 and told["audit"]["num_changed"] == 0
    assert "The service agrees with its model" in (tmp_path / "out" / "specdec-audit.md").read_text()


def test_another_checkpoint_than_the_one_that_is_served_is_refused(
    tiny_cluster: Cluster, tiny_pair: ModelPair, prompts: Path
) -> None:
    result = audit(tiny_pair.draft, prompts, "--address", tiny_cluster.address)
    assert result.exit_code == 1
    assert "other weights" in result.stderr


async def test_any_openai_server_is_held_against_a_checkpoint(
    tiny_cluster: Cluster, tiny_pair: ModelPair, prompts: Path
) -> None:
    async with gateway(tiny_cluster.address) as at_hand:
        how = ("--against", f"{at_hand.url}/v1", "--model", "target")
        right = await asyncio.to_thread(audit, tiny_pair.target, prompts, *how)
        wrong = await asyncio.to_thread(audit, tiny_pair.draft, prompts, *how)
    assert right.exit_code == 0, right.output
    assert "the service does not report whether it speculated" in right.stdout
    assert wrong.exit_code == 1, wrong.output
    assert "beyond rounding" in wrong.stdout
