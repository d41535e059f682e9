"""`specdec tune` on the shipped pair: what it measures, what it writes, and that `up` starts with that."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import yaml
from typer.testing import CliRunner

from specdec.client import Client
from specdec.commands.app import app
from specdec.commands.tune import probe_processes
from specdec.commands.tune.advice import Advice
from specdec.commands.tune.prediction import SettingsChoice
from specdec.commands.tune.settings_files import DeploymentFacts, up_file
from specdec.commands.up import service_process
from specdec.v1 import common_pb2
from tests.support.engine.other_tokenizers import permuted_draft
from tests.support.services.faults import make_request
from tests.support.services.model_pair import ModelPair
from tests.support.services.up_command import UpCommand, running_up, start_command

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

QUICK = ("--device", "cpu", "--num-prompts", "1", "--max-tokens", "16", "--temperature", "0,1", "--concurrency", "1")


def test_the_shipped_pair_is_measured_verified_and_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_processes, "subprocess", vars(service_process)["subprocess"])  # the fork server's
    out = tmp_path / "tuned.yaml"
    arguments = ["tune", *QUICK, "--repeats", "1", "--out", str(out), "--report", str(tmp_path / "report")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    found = json.loads((tmp_path / "report/specdec-tune.json").read_text())["tune"]
    assert {(point["temperature"], point["load"]) for point in found["points"]} == {(0.0, 1), (1.0, 1)}
    assert all(point["predicted"] > 0 and point["measured"] > 0 for point in found["points"])
    assert found["survival"]["0.0"]["coupled"] == sorted(found["survival"]["0.0"]["coupled"], reverse=True)
    assert 0 < found["survival"]["1.0"]["rejection"][0] <= 1
    assert len(found["curves"]["0.0"]["1"]) == 16
    assert found["reasons"] and found["reasons"][0] in result.stdout.replace("\n", " ")
    values = yaml.safe_load(out.read_text())["up"]
    assert ("num-drafts" in values) is not found["speculate"]
    assert values["placement"] in ("apart", "together")
    rates = re.search(r"placement: (\w+) \(tokens/s decoded: (\w+) (\d+), (\w+) (\d+)\)", result.stderr)
    assert rates is not None
    assert values["placement"] == rates[1] == rates[2]  # the fastest comes first
    assert {rates[2], rates[4]} == {"apart", "together"}
    assert int(rates[3]) >= int(rates[5]) > 0
    assert yaml.safe_load((tmp_path / "tuned.chart.yaml").read_text())["draft"]


@pytest.mark.long
def test_a_draft_with_another_tokenizer_is_tuned_and_served_by_the_tokens_that_both_have(tmp_path: Path) -> None:
    draft, out = permuted_draft(tmp_path / "draft"), tmp_path / "tuned.yaml"
    arguments = ["tune", *QUICK, "--draft", str(draft), "--placement", "apart", "--repeats", "1", "--out", str(out)]
    result = CliRunner().invoke(app, [*arguments, "--report", str(tmp_path / "report")])
    assert result.exit_code == 0, result.stderr
    assert "it has 4096 of the target's 4096 tokens (100%) and drafts those" in result.stderr
    found = json.loads((tmp_path / "report/specdec-tune.json").read_text())
    assert found["draft_has_another_tokenizer"]
    assert found["tune"]["survival"]["0.0"]["coupled"][0] > 0.3
    assert all(point["measured"] > 0 for point in found["tune"]["points"])


def test_up_starts_with_the_file(tiny_pair: ModelPair, tmp_path: Path) -> None:
    choice = SettingsChoice(draft_tokens=3, num_siblings=1, max_heads=2, mode="rejection")
    advice = Advice(choice=choice, points=(), speculate=True, reasons=("It pays.",))
    place = DeploymentFacts(target_model=str(tiny_pair.target), draft_model=str(tiny_pair.draft), device="cpu")
    file = tmp_path / "tuned.yaml"
    file.write_text(up_file(advice, place))
    with running_up(tiny_pair, ("--config", str(file))) as up:
        mode, verified = served(up)
    assert mode == common_pb2.VERIFY_MODE_REJECTION
    assert len(verified) <= 3


def served(up: UpCommand) -> tuple[int, list[int]]:
    """The mode of verification, and how many steps verified each depth."""
    import asyncio

    async def ask() -> tuple[int, list[int]]:
        async with Client(up.address) as client:
            info = await client.model_info()
            completion = await client.complete(make_request(max_tokens=40))
            return info.default_verify_mode, list(completion.require_finished().stats.verified_by_depth)

    return asyncio.run(ask())


def test_an_interrupt_leaves_nothing_running(tmp_path: Path) -> None:
    process = start_command("tune", *QUICK, "--out", str(tmp_path / "x.yaml"), stdout=subprocess.PIPE)
    assert process.stderr is not None
    for line in process.stderr:
        if re.search("loading|target: outputs|steps over", line):
            break
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, notes = process.communicate(timeout=60)
    assert process.returncode == 130, notes
    assert "Traceback" not in notes
    assert psutil.wait_procs(children, timeout=30)[1] == []
    assert not (tmp_path / "x.yaml").exists()
