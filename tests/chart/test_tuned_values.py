"""The chart takes the values that `specdec tune` writes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from specdec.commands.tune.advice import Advice
from specdec.commands.tune.prediction import SettingsChoice
from specdec.commands.tune.settings_files import DeploymentFacts, chart_file
from tests.chart.rendered import CHART, Helm, containers

PLACE = DeploymentFacts(target_model="t", draft_model="d", device="cpu", target_cores=(0, 1), draft_cores=(2,))


@pytest.mark.parametrize("speculate", [True, False])
def test_the_chart_renders_with_tuned_values(helm: Helm, tmp_path: Path, speculate: bool) -> None:
    choice = SettingsChoice(draft_tokens=5, num_siblings=1, max_heads=2, mode="rejection")
    advice = Advice(choice=choice, points=(), speculate=speculate, reasons=("Speculation: pays, or not.",))
    file = tmp_path / "tuned.chart.yaml"
    file.write_text(chart_file(advice, PLACE))
    example = CHART / "examples" / "single-node-cpu.yaml"
    done = helm("template", "demo", str(CHART), "--kube-version", "1.31.0", "-f", str(example), "-f", str(file))
    assert done.returncode == 0, done.stderr
    deployments = {
        document["metadata"]["labels"]["app.kubernetes.io/component"]: yaml.safe_dump(document)
        for document in yaml.safe_load_all(done.stdout)
        if document and document["kind"] in ("Deployment", "StatefulSet")
    }
    assert ("draft" in deployments) is speculate
    if speculate:
        text = " ".join(deployments["target"].split())
        assert "MAX_DRAFT_TOKENS" in text.upper().replace("-", "_")
        assert "max-siblings" not in text
        assert "NUM_SIBLINGS" in deployments["draft"].upper().replace("-", "_")
        assert "rejection" in deployments["coordinator"]


def test_a_draft_with_another_tokenizer_is_told_the_target_of_its_release(helm: Helm, tmp_path: Path) -> None:
    choice = SettingsChoice(draft_tokens=5, num_siblings=1, max_heads=2, mode="coupled")
    advice = Advice(choice=choice, points=(), speculate=True, reasons=("Speculation: pays.",))
    told = {}
    for is_translated in (False, True):
        file = tmp_path / "tuned.chart.yaml"
        file.write_text(chart_file(advice, dataclasses.replace(PLACE, is_translated=is_translated)))
        done = helm("template", "demo", str(CHART), "--kube-version", "1.31.0", "-f", str(file))
        assert done.returncode == 0, done.stderr
        documents = [document for document in yaml.safe_load_all(done.stdout) if document]
        told[is_translated] = {
            role: [flag for flag in container["args"] if flag.startswith("--target=")]
            for role, _, container in containers(documents)
        }
    nobody: list[str] = []
    assert set(map(str, told[False].values())) == {str(nobody)}
    assert told[True].pop("draft") == ["--target=demo-specdec-target-headless:50052"]
    assert all(flags == nobody for flags in told[True].values())
