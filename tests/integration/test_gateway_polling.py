"""What a gateway tells gRPC of how to poll."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration


_STARTS = pytest.mark.parametrize("start", [["gateway"], ["specdec.commands.main", "serve", "gateway"]])


def _said_until_it_listens(start: list[str], experiments: str | None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    if experiments is not None:
        environment["GRPC_EXPERIMENTS"] = experiments
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", *start, "--coordinators=127.0.0.1:1", "--port=0", "--host=127.0.0.1"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as gateway:
        said = []
        for line in gateway.stderr or ():
            said.append(line)
            if '"listening"' in line:
                gateway.terminate()
                return "".join(said)
    raise AssertionError("".join(said))


@_STARTS
def test_grpc_knows_the_switch_of_its_event_engine(start: list[str]) -> None:
    """Fails with the first version of gRPC that does not: then the switch goes, and the gateway is measured again."""
    assert "Unknown experiment" not in _said_until_it_listens(start, None)


@_STARTS
def test_what_operators_tell_grpc_is_left_alone(start: list[str]) -> None:
    assert "Unknown experiment: no_such_switch" in _said_until_it_listens(start, "no_such_switch")
