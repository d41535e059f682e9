"""Files with flags of commands, and the doctor's look at one for `specdec up`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from rich.text import Text
from typer.testing import CliRunner

from specdec.commands.app import app
from specdec.commands.inputs.config_file import read_config


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("just a text", "holds no sections, such as `up:`"),
        ("- 1\n- 2\n", "holds no sections, such as `up:`"),
        ("up: 4\n", "the section up holds no flags"),
        ("no_such: {}\n", "'no_such' is not a section of"),
        ("up: {dratf: x}\n", "dratf is not a flag of up; did you mean draft?"),
        ("up: [\n", "does not parse"),
    ],
)
@pytest.mark.parametrize("command", [("doctor", "--settings"), ("up", "--config")])
def test_a_file_that_holds_no_flags_is_refused_with_the_reason(
    command: tuple[str, str], content: str, told: str, tmp_path: Path
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    result = run(*command, str(file))
    assert result.exit_code == 2, result.output
    assert told in result.stderr
    assert command[1] in result.stderr


@pytest.mark.parametrize("content", ["", "up:\n", "up: {}\n"])
def test_an_empty_section_is_what_up_does_without_flags(content: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    result = run("doctor", "--settings", str(file))
    assert result.exit_code == 0, result.output
    assert "pass tokenizers are equal by content" in result.stdout


def test_the_doctor_knows_the_heads_that_up_is_told_by_name(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("up: {drafter: [eagle3, ngram]}\n")
    result = run("doctor", "--settings", str(file), "--json")
    assert result.exit_code == 0, result.output
    found = {line["what"]: line for line in json.loads(result.stdout)}
    assert found["eagle3: its files can be read, and layer ids are explicit"]["measured"].startswith("2, 5, 9")
    assert "tokenizers are equal by content" not in found, "there is no draft"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("up: {drafter: [magic]}\n", "'magic' is no drafter"),
        ("up: {drafter: [eagle3], target: /nowhere}\n", "no eagle3 head ships for this target"),
        ("up: {drafter: [ngram], target-set: [drafters=suffix]}\n", "--target-set sets drafters already"),
    ],
)
def test_drafters_that_up_would_refuse_are_refused_by_the_doctor(content: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    result = run("doctor", "--settings", str(file))
    assert result.exit_code == 2, result.output
    assert told in result.stderr


def test_every_command_has_a_section_and_every_flag_a_variable_of_its_name_and_its_whole_help(tmp_path: Path) -> None:
    group: Any = typer.main.get_command(app)
    context = typer.Context(group, info_name="specdec")
    file = tmp_path / "settings.yaml"
    for name in set(group.list_commands(context)) - {"serve", "health", "keys"}:
        file.write_text(f"{name}: {{}}\n")
        assert read_config(file) == {name: {}}
        command = group.get_command(context, name)
        for option in command.params:
            flag = max(option.opts, key=len)
            if flag.startswith("--") and flag not in ("--address", "--help"):
                variable = f"SPECDEC_{name}_{flag[2:]}".upper().replace("-", "_")
                assert option.envvar == variable, (name, flag)
            shown = Text.from_markup(option.help or "").plain
            assert shown == (option.help or ""), "rich takes a word in brackets for a style and drops it"
