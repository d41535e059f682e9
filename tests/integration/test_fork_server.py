"""A process that a template makes is what subprocess would have started: see tests/support/fork_server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.fork_server.popen import Forking, Template

PROBE = "tests.support.fork_server.probe"
STARTER = "specdec.service.process"


@pytest.fixture(scope="module")
def forking() -> Forking:
    template = Template.start("service")
    return Forking(lambda _: template)


def probe(module: Any, folder: Path, *, starter: bool = False, **options: Any) -> tuple[dict[str, Any], int]:
    """What the probe says of itself, and how it ended; with files, pipes and an environment of its own."""
    (folder / "log").unlink(missing_ok=True)
    read_end, write_end = os.pipe()
    words = [STARTER, str(os.getpid()), "0", PROBE] if starter else [PROBE]
    with (folder / "log").open("ab") as log:
        process = module.Popen(
            [sys.executable, "-m", *words, "3", str(write_end), "ä word"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[write_end],
            env={**os.environ, "SPECDEC_PROBE": "1", "PYTHONPATH": str(folder)},
            **options,
        )
    os.close(write_end)
    process.stdin.write(b"said")
    process.stdin.close()
    code = process.wait(60)
    assert os.read(read_end, 100) == b"written"
    os.close(read_end)
    said, left = (folder / "log").read_text().splitlines()
    assert left == "left"  # at its exit
    return {**json.loads(said), "arguments": json.loads(said)["arguments"][2:]}, code


@pytest.mark.parametrize(
    "options", [{}, {"start_new_session": True}, {"starter": True}], ids=["plain", "session", "starter"]
)
def test_it_has_the_same_arguments_environment_files_session_and_end(
    forking: Forking, tmp_path: Path, options: dict[str, Any]
) -> None:
    executed, forked = probe(subprocess, tmp_path, **options), probe(forking, tmp_path, **options)
    for name, value in executed[0].items():
        assert (name, forked[0][name]) == (name, value)
    assert forked[0]["is_child_of"] == os.getpid()
    assert forked[1] == 3


def test_one_that_a_signal_ends_says_so(forking: Forking) -> None:
    command = [sys.executable, "-m", PROBE, "0", "1"]
    with forking.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert process.poll() is None
        assert PROBE in psutil.Process(process.pid).cmdline()
        process.kill()
        assert process.wait(60) == -signal.SIGKILL


def test_another_environment_than_the_template_imported_in_is_executed(forking: Forking) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "7"}
    command = [sys.executable, "-m", PROBE, "0", "1"]
    with forking.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment) as process:
        assert type(process) is subprocess.Popen
        assert process.wait(60) == 0


def test_variables_that_tests_leave_in_their_process_start_nothing_cold(forking: Forking) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": "a folder", "OTEL_BSP_SCHEDULE_DELAY": "1"}
    command = [sys.executable, "-m", PROBE, "0", "1"]
    with forking.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment) as process:
        assert type(process) is not subprocess.Popen
        assert process.wait(60) == 0


def test_a_template_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    template: list[Template] = []

    def start() -> None:
        template.append(Template.start("service"))
        assert probe(Forking(lambda _: template[0]), tmp_path)[1] == 3

    starter = threading.Thread(target=start)
    starter.start()
    starter.join()
    assert probe(Forking(lambda _: template[0]), tmp_path)[1] == 3
