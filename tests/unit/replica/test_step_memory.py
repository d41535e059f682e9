"""What an engine was working on is known when it is gone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from specdec.replica.bridge.step_memory import MAX_KEYS, StepMemory, new_step_file
from specdec.v1 import common_pb2
from specdec.wire.error_details import KEY_BYTES, session_key, split_keys
from specdec.wire.errors import Unavailable, to_status

KEYS = [session_key(f"coordinator/request/{number}") for number in range(64)]


def test_a_process_that_is_killed_leaves_whom_it_was_working_for() -> None:
    fd = new_step_file()
    seen = StepMemory(fd)
    assert seen.read_keys() == b""
    script = (
        "import os, sys\n"
        "from specdec.replica.bridge.step_memory import StepMemory\n"
        "from specdec.wire.error_details import session_key\n"
        "steps = StepMemory(int(sys.argv[1]))\n"
        "steps.work_on([session_key(name) for name in ('a', 'b')])\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(fd)], pass_fds=[fd], check=False)
    os.close(fd)
    keys = seen.read_keys()
    assert keys is not None
    assert split_keys(keys) == {session_key("a"), session_key("b")}


def test_a_rest_names_nobody_and_work_for_nobody_in_particular_is_not_told() -> None:
    steps = StepMemory()
    steps.work_on(KEYS)
    steps.work()
    assert steps.read_keys() is None
    steps.work_on(KEYS[:1])
    assert steps.read_keys() == KEYS[0]
    steps.rest()
    assert steps.read_keys() == b""


def test_a_smaller_step_after_a_larger_one_names_its_own_sessions_only() -> None:
    steps = StepMemory()
    steps.work_on(KEYS)
    steps.work_on(KEYS[40:42])
    assert split_keys(steps.read_keys() or b"") == set(KEYS[40:42])


@pytest.mark.parametrize("num_keys", [0, MAX_KEYS + 1])
def test_a_step_of_nobody_or_of_more_than_there_is_room_for_is_not_told(num_keys: int) -> None:
    steps = StepMemory()
    steps.work_on([bytes(KEY_BYTES)] * num_keys)
    assert steps.read_keys() is None


def test_the_largest_step_that_has_room_is_told_in_full() -> None:
    steps = StepMemory()
    keys = [number.to_bytes(KEY_BYTES, "big") for number in range(MAX_KEYS)]
    steps.work_on(keys)
    assert split_keys(steps.read_keys() or b"") == set(keys)


def test_the_status_of_a_stream_has_room_for_all_who_are_told() -> None:
    """gRPC hands on 4 KB of it."""
    error = Unavailable("the engine process was killed by SIGKILL", reason="ENGINE_LOST")
    keys = b"k" * KEY_BYTES * MAX_KEYS
    error.attached.append(
        common_pb2.EngineEnd(instance_id="ab" * 8, reason="ENGINE_LOST", is_told=True, session_keys=keys)
    )
    assert any(detail.Is(common_pb2.EngineEnd.DESCRIPTOR) for detail in to_status(error).details)
