"""`specdec bench` against real services; what an interruption leaves."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdec.commands.app import app
from specdec.commands.up.cluster import Cluster
from tests.support.services.up_command import start_command

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_the_shipped_pair_is_measured_with_its_own_prompts(shipped_cluster: Cluster, tmp_path: Path) -> None:
    arguments = ["bench", "--address", shipped_cluster.address, "--concurrency", "1,2", "--requests", "2"]
    arguments += ["--repeats", "1", "--max-tokens", "24", "--report", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    found = json.loads((tmp_path / "specdec-bench.json").read_text())
    assert "prompts.json" in found["prompts"]
    for row in found["bench"]:
        assert (row["num_requests"], row["num_failed"]) == (2, 0)
        assert row["tokens_per_s"]["median"] > 0
        assert row["first_token_ms"]["p50"] <= row["end_to_end_ms"]["p50"]
        if row["speculation"]:
            assert row["num_equal"] == row["num_compared"] == 2
            assert 0 < row["accepted_share"] <= 1
    parts = found["breakdown"]
    assert {row["kind"] for row in parts["by_kind"]} <= {"library", "tests"}
    assert parts["by_position"][0]["first_position"] == 1
    drafted = [row for row in parts["by_drafter"] if row["drafter"] == "draft_model"]
    assert len(drafted) == 2  # one of each load
    assert all(0 < row["num_accepted"] <= row["num_verified"] <= row["num_proposed"] for row in drafted)
    for part in ("kind", "position", "drafter"):
        assert f"specdec-bench-acceptance-{part}.svg" in (tmp_path / "specdec-bench.md").read_text()


def test_an_interrupt_reports_what_there_is(shipped_cluster: Cluster, tmp_path: Path) -> None:
    arguments = ["bench", "--address", shipped_cluster.address, "--concurrency", "1", "--repeats", "1000"]
    arguments += ["--requests", "2", "--max-tokens", "32", "--report", str(tmp_path)]
    process = start_command(*arguments, stdout=subprocess.PIPE)
    assert process.stderr is not None
    for line in process.stderr:  # One of each kind is over by the second.
        if (run := re.search(r"run (\d+) of 1000", line)) and int(run[1]) >= 2:
            break
    process.send_signal(signal.SIGINT)
    output, notes = process.communicate(timeout=60)
    assert process.returncode == 130, notes
    assert "Speed, temperature 0" in output
    assert "Interrupted: the tables show the runs until then" in notes
    assert "Traceback" not in notes
    found = json.loads((tmp_path / "specdec-bench.json").read_text())
    assert found["interrupted"]
    assert sum(row["num_failed"] for row in found["bench"]) == 0
