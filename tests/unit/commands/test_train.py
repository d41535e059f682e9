"""`specdec train` and `specdec up --drafter`: what they refuse, and a whole run over the smallest target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from specdec.commands.app import app
from specdec.commands.shipped_pair import shipped_head, shipped_pair
from specdec.commands.up.drafters import drafter_settings
from specdec.config import TargetSettings
from tests.support.heads.targets import fixture_target


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"token_ids": [i, i + 1, i + 2]}) + "\n" for i in range(20)))
    return file


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["train", *arguments], env={"COLUMNS": "300", "NO_COLOR": "1"})
    assert result.exit_code != 0
    return " ".join(result.output.split())


def test_what_does_not_go_with_a_kind_is_refused(prompts: Path, tmp_path: Path) -> None:
    usual = ("--prompts", str(prompts), "--out", str(tmp_path / "out"))
    assert "only eagle3 and dspark read layers" in refusal("medusa", *usual, "--layer-ids", "1,2,3")
    assert "a draft_model proposes all tokens" in refusal("draft_model", *usual, "--draft-vocab-size", "20")
    assert "only draft_model continues from a draft" in refusal("eagle3", *usual, "--initial-draft", "x")
    assert "HOST:PORT" in refusal("eagle3", *usual, "--address", "nowhere")
    assert "eagle7" in refusal("eagle7", *usual)


def test_missing_prompts_and_targets_are_named(prompts: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert "cannot read" in refusal("eagle3", "--prompts", str(tmp_path / "none"), "--out", out)
    assert "no such directory" in refusal("eagle3", "--prompts", str(prompts), "--out", out, "--target", "/no/target")


def test_too_few_prompts_and_tokens_that_the_target_has_not_are_refused(tmp_path: Path) -> None:
    fixture_target(tmp_path / "target")
    file = tmp_path / "prompts.json"
    usual = ("eagle3", "--prompts", str(file), "--out", str(tmp_path / "out"), "--target", str(tmp_path / "target"))
    file.write_text("[[1, 2, 3]]")
    assert "too few prompts" in refusal(*usual)
    file.write_text(json.dumps([[1, 2, 4000]] * 20))
    assert "outside the target's vocabulary" in refusal(*usual)
    file.write_text(json.dumps(["a text"] * 20))
    assert "no tokenizer" in refusal(*usual)


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_a_run_writes_a_checkpoint_with_its_recipe_and_a_report(kind: str, prompts: Path, tmp_path: Path) -> None:
    fixture_target(tmp_path / "target")
    out = tmp_path / "head"
    arguments = ["train", kind, "--prompts", str(prompts), "--out", str(out), "--target", str(tmp_path / "target")]
    arguments += ["--steps", "3", "--max-tokens", "16", "--depth", "2", "--layer-ids", "1,2,3", "--loss", "coupled"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert f"specdec up --drafter {kind}={out}" in result.output
    report = json.loads((out / "training_report.json").read_text())
    assert report["recipe"]["loss"] == "coupled"
    for results in report["before"], report["after"]:
        assert [each["temperature"] for each in results] == [0.0, 1.0]
        assert all(len(each["coupled"]) == len(each["ratio_test"]) == 2 for each in results)
    assert [each["num_draft_tokens"] for each in report["predicted"]["1"]] == [1, 2]
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors", "training_report.json"}


def test_the_head_that_ships_is_known_by_its_method() -> None:
    pair = shipped_pair()
    assert pair is not None
    assert shipped_head("eagle3") == pair / "eagle3"
    assert shipped_head("dflash") is None
    setting = drafter_settings(["eagle3", "ngram", "mtp", "draft_model"], target=None)
    drafters = TargetSettings(model="target", **setting).drafters
    assert [options.method for options in drafters] == ["eagle3", "ngram", "mtp"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("telepathy", "is no drafter"),
        ("ngram=folder", "takes no folder"),
        ("medusa=nowhere", "has no config.json"),
        ("medusa", "no medusa head ships"),
    ],
)
def test_drafters_that_there_are_not_are_refused(name: str, why: str) -> None:
    with pytest.raises(typer.BadParameter, match=why):
        drafter_settings([name], target=None)


def test_the_head_that_ships_is_for_the_target_that_ships_wherever_that_lies(tmp_path: Path) -> None:
    pair = shipped_pair()
    assert pair is not None
    by_default = drafter_settings(["eagle3"], target=None)
    (tmp_path / "link").symlink_to(pair / "target")
    shutil.copytree(pair / "target", tmp_path / "copy")
    for same in (pair / "target", tmp_path / "link", tmp_path / "copy"):
        assert drafter_settings(["eagle3"], target=str(same)) == by_default
    spoilt = tmp_path / "copy" / "model.safetensors"
    weights = bytearray(spoilt.read_bytes())
    weights[-1] ^= 1
    spoilt.write_bytes(weights)
    (tmp_path / "empty").mkdir()
    for other in (tmp_path / "copy", tmp_path / "empty", tmp_path / "nowhere", pair / "draft"):
        with pytest.raises(typer.BadParameter, match="ships for this target"):
            drafter_settings(["eagle3"], target=str(other))
