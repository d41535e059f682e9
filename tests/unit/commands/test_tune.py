"""`specdec tune`: the files it writes, as `up` reads them, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from click.testing import Result
from typer.testing import CliRunner

from specdec.commands.app import app
from specdec.commands.inputs.config_file import read_config
from specdec.commands.tune.advice import Advice, LoadPoint
from specdec.commands.tune.measured import StepTimes
from specdec.commands.tune.placements import speed
from specdec.commands.tune.prediction import Measurements, SettingsChoice
from specdec.commands.tune.settings_files import DeploymentFacts, chart_file, up_file
from specdec.commands.up.command import parse_settings
from specdec.commands.up.plan import LocalPlan, plan_services
from specdec.commands.up.service_process import ServiceSpec
from specdec.config import CoordinatorSettings, DraftSettings, TargetSettings, load_settings
from tests.support.engine.other_tokenizers import draft_with_fewer_tokens
from tests.support.for_each import for_each

CHOICE = SettingsChoice(draft_tokens=5, num_siblings=1, max_heads=2, mode="rejection")
PLACE = DeploymentFacts(target_model="t", draft_model="d", device="cpu", target_cores=(0,), draft_cores=(1,))


def advice(speculate: bool = True) -> Advice:
    return Advice(choice=CHOICE, points=(), speculate=speculate, reasons=("Because it: pays # 2.",))


def written(tmp_path: Path, text: str) -> dict[str, Any]:
    file = tmp_path / "tuned.yaml"
    file.write_text(text)
    return read_config(file)["up"]


def read_settings(cls: Any, spec: ServiceSpec) -> Any:
    return load_settings(cls, list(spec.arguments), env_prefix=cls.env_prefix, prog=spec.name)


def test_up_takes_every_value_of_the_file(tmp_path: Path) -> None:
    values = written(tmp_path, up_file(advice(), PLACE))
    group: Any = typer.main.get_command(app)
    flags = {
        flag.lstrip("-").replace("-", "_") for param in group.get_command(None, "up").params for flag in param.opts
    }
    assert values.keys() <= flags
    plan = LocalPlan(
        target_model=values["target"],
        draft_model=values["draft"],
        device=values["device"],
        free_ports=True,
        target_settings=parse_settings(values["target_set"], "--target-set"),
        draft_settings=parse_settings(values["draft_set"], "--draft-set"),
        coordinator_settings=parse_settings(values["coordinator_set"], "--coordinator-set"),
    )
    target, draft, coordinator = plan_services(plan, environment={}, cores=(0, 1))
    read = read_settings(TargetSettings, target)
    assert (read.max_draft_tokens, read.engine_cores, read.num_threads) == (5, "0", 1)
    drafts = read_settings(DraftSettings, draft)
    assert (drafts.max_draft_tokens, drafts.max_ahead_tokens, drafts.num_siblings, drafts.max_heads) == (5, 11, 1, 2)
    assert read_settings(CoordinatorSettings, coordinator).verify_mode == "rejection"


def test_a_target_that_runs_its_draft_gets_the_settings_of_the_draft(tmp_path: Path) -> None:
    place = dataclasses.replace(PLACE, target_cores=(0, 1), draft_cores=(0, 1), placement="together")
    values = written(tmp_path, up_file(advice(), place))
    plan = LocalPlan(
        target_model=values["target"],
        draft_model=values["draft"],
        device=values["device"],
        free_ports=True,
        placement=values["placement"],
        target_settings=parse_settings(values["target_set"], "--target-set"),
        draft_settings=parse_settings(values["draft_set"], "--draft-set"),
    )
    target, _ = plan_services(plan, environment={}, cores=(0, 1))
    read = read_settings(TargetSettings, target)
    own = read.own_draft_settings
    assert (read.engine_cores, read.num_threads) == ("0,1", 2)
    assert (own.model, own.max_draft_tokens, own.max_ahead_tokens, own.num_siblings) == ("d", 5, 11, 1)


def test_the_faster_placement_is_the_one_that_decodes_more_as_advised() -> None:
    measured = Measurements(target=StepTimes({1: {1: 10.0}}), draft=StepTimes({1: {1: 1.0}}), outputs={})
    points = (
        LoadPoint(temperature=0.0, load=1, predicted=3.0, measured=2.0),
        LoadPoint(temperature=1.0, load=1, predicted=2.0),
    )
    both = dataclasses.replace(advice(), points=points)
    rates = {(0.0, 1): 180.0}
    assert speed(measured, both, rates) == pytest.approx((180 * 200) ** 0.5)  # the second one as predicted
    plain = dataclasses.replace(both, speculate=False)
    assert speed(measured, plain, rates) == pytest.approx((90 * 100) ** 0.5)


def test_without_speculation_there_is_no_draft(tmp_path: Path) -> None:
    values = written(tmp_path, up_file(advice(speculate=False), PLACE))
    assert values["num_drafts"] == 0
    assert "draft_set" not in values
    assert yaml.safe_load(chart_file(advice(speculate=False), PLACE))["draft"] == {"enabled": False}


def test_reasons_stand_in_the_files_as_comments() -> None:
    for text in (up_file(advice(), PLACE), chart_file(advice(), PLACE)):
        assert "# Because it: pays # 2.\n" in text


def test_a_gpu_has_no_cores_to_name() -> None:
    place = DeploymentFacts(target_model="t", draft_model="d", device="cuda")
    assert "cores" not in up_file(advice(), place)
    assert "num_threads" not in chart_file(advice(), place)


def tune(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["tune", "--device", "cpu", *arguments], env={"COLUMNS": "160"})


@for_each(
    "arguments, code, words",
    [
        (("--target", "/no/such/model"), 1, "no such directory: /no/such/model"),
        (("--temperature", "-1"), 2, "-1.0 is outside [0, 100]"),
        (("--temperature", "0,200"), 2, "200.0 is outside [0, 100]"),
        (("--concurrency", "0"), 2, "whole numbers from 1"),
        (("--concurrency", "1,65"), 2, "64 sequences at most"),
        (("--out", "/proc/tuned.yaml"), 2, "cannot write to /proc/tuned.yaml"),
        (("--concurrency", "x"), 2, "not a comma-separated list"),
        (("--prompts", "/no/such/file"), 2, "No such file"),
        (("--out", "/no/such/folder/x.yaml"), 2, "there is no folder"),
        (("--report", "/proc/no/such/folder"), 2, "cannot write to /proc/no/such/folder"),
        (("--verify-mode", "neither"), 2, "neither"),
        (("--device", "tpu"), 1, "none of auto, cpu, cuda"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(arguments: tuple[str, ...], code: int, words: str) -> None:
    result = tune(*arguments)
    assert result.exit_code == code, result.output
    assert words in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.output


def test_a_draft_that_would_draft_text_is_refused_with_what_it_has_and_why(tmp_path: Path) -> None:
    draft = draft_with_fewer_tokens(tmp_path / "draft", 700)
    result = tune("--draft", str(draft))
    assert result.exit_code == 1
    said = " ".join(result.stderr.split())
    assert re.search(r"has another tokenizer than .*: it has \d+ of the target's 4096 tokens \(1\d%\)", said)
    assert "drafts text" in said and "specdec bench" in said


def test_a_draft_whose_tokenizer_cannot_be_read_is_refused(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text("{}")
    (draft / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"b": 0}}}))
    result = tune("--draft", str(draft))
    assert result.exit_code == 1
    assert "its tokenizer or config cannot be read" in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
