"""The parts of the bench that start real processes, at their smallest: that they run, and report what they say."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def _said(*arguments: str) -> str:
    run = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=500, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


def _rows(text: str) -> list[list[str]]:
    lines = text.splitlines()
    rows = [line for line in lines if re.match(r"│ +\d", line)] or [line for line in lines if re.match(r" +\d", line)]
    return [re.findall(r"[\w.+-]+", row) for row in rows]


def test_a_coordinator_relays_for_replicas_without_models() -> None:
    ((streams, offered, relayed, *figures),) = _rows(_said("bench.relay", "measure", "--streams=2", "--seconds=1"))
    assert (streams, offered) == ("2", "200")
    assert float(relayed) > 0
    assert len(figures) == 5


def test_a_gateway_is_compared_with_grpc() -> None:
    arguments = ("--streams=2", "--load=2", "--seconds=1", "--repeats=1")
    alone, added, load = _rows(_said("bench.http", *arguments))
    assert alone[0] == "1" and added[0] == load[0] == "2"
    assert float(load[3]) > 0  # streams per core
