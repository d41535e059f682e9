"""The folder of metrics' files goes with its service, and what a killed one left goes at the next start."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from specdec.telemetry import metric_files, metrics_folder


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def hold(said: Connection) -> None:
    with metrics_folder() as folder:
        assert folder is not None
        Path(folder, "counter_1.db").write_text("figures")
        said.send(folder)
        signal.pause()


def test_what_killed_processes_left_is_removed_and_what_running_ones_have_is_not(parent: Path) -> None:
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    killed = fork.Process(target=hold, args=(theirs,))
    killed.start()
    left = Path(ours.recv())
    with metrics_folder() as folder:
        assert left.is_dir()
    killed.kill()
    killed.join()
    assert list(parent.iterdir()) == [left]
    with metrics_folder() as folder, metrics_folder() as another:
        assert {str(path) for path in parent.iterdir()} == {folder, another}
    assert not list(parent.iterdir())


def test_only_own_folders_are_removed(parent: Path) -> None:
    (parent / "elsewhere").mkdir()
    (parent / "elsewhere" / "file").touch()
    (parent / "specdec-figures-link").symlink_to(parent / "elsewhere")
    (parent / "specdec-figures-file").touch()
    before = {path.name for path in parent.rglob("*")}
    with metrics_folder():
        pass
    assert {path.name for path in parent.rglob("*")} == before


def test_a_folder_that_another_start_took_for_a_left_one_is_made_again(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = tempfile.mkdtemp, list[str]()

    def make_and_lose_the_first(**options: str) -> str:
        made.append(make(**options))
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose_the_first)
    with metrics_folder() as folder:
        assert len(made) == 2
        assert folder == made[1]
        assert os.path.isdir(folder)


def test_figures_are_in_memory_where_no_folder_can_be_written(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    monkeypatch.setattr(metric_files, "_MEMORY", str(parent))
    with metrics_folder() as folder:
        assert folder is not None
        assert Path(folder).parent == parent
