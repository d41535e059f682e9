"""`specdec train` with a service that answers the prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdec.commands.app import app
from specdec.commands.up.cluster import Cluster
from tests.support.services.tiny_pair import ModelPair

pytestmark = pytest.mark.integration


def test_a_service_answers_what_the_target_itself_would(
    tiny_cluster: Cluster, tiny_pair: ModelPair, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": f"def number_{i}():"}) + "\n" for i in range(10)))
    outputs = []
    for name, more in (("here", []), ("there", ["--address", tiny_cluster.address])):
        arguments = ["train", "medusa", "--prompts", str(prompts), "--target", str(tiny_pair.target)]
        arguments += ["--out", str(tmp_path / name), "--steps", "2", "--depth", "2", "--max-tokens", "12", *more]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        _, *kept = map(json.loads, (tmp_path / f"{name}-work" / "texts.jsonl").read_text().splitlines())
        outputs.append(sorted(kept))
    assert outputs[0] == outputs[1]
