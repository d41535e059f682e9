"""The first code of an engine process: `python -m specdec.replica.bridge.engine_child`, started by EngineProcess.

It reads its instructions from standard input, makes sure that it dies with its parent, pins itself to its cores, and
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import socket
import sys
from typing import Any, TypedDict

import structlog

from specdec.replica.bridge.frames import EnginePort, FrameKind, PeerGone
from specdec.replica.bridge.pulse import Pulse
from specdec.replica.bridge.step_memory import StepMemory
from specdec.service.process import die_with_parent, leave_signals_to_parent, missing_extra
from specdec.telemetry import setup_logging
from specdec.telemetry.logs.writer import flush_logs

_LAST_FRAMES_S = 2.0
"""Seconds to send the last frames before the process ends."""


class EngineInstructions(TypedDict):
    """The parent's instructions."""

    entry: str
    """module:function, called with the port and the settings."""
    settings_class: str
    """module:class, a pydantic model."""
    settings: str
    """The settings as JSON."""
    socket_fd: int
    pulse_fd: int
    step_fd: int
    parent_pid: int
    cores: list[int] | None
    service: str
    log_level: str
    log_format: str
    instance_id: str
    """Id of this engine process and its servicer together."""


def main() -> int:
    """Run the entry; returns 0 after its return or the servicer's end, 1 after a failure."""
    instructions: EngineInstructions = json.load(sys.stdin)
    die_with_parent(instructions["parent_pid"])
    leave_signals_to_parent()
    faulthandler.enable()
    setup_logging(instructions["service"], instructions["log_level"], instructions["log_format"])
    if instructions["cores"]:
        os.sched_setaffinity(0, instructions["cores"])
    pulse = Pulse(instructions["pulse_fd"])
    os.set_inheritable(instructions["pulse_fd"], False)  # ranks get it
    pulse.start_beating()
    steps = StepMemory(instructions["step_fd"])
    os.close(instructions["step_fd"])
    os.set_inheritable(instructions["socket_fd"], False)
    port = EnginePort(socket.socket(fileno=instructions["socket_fd"]), instructions["instance_id"], pulse, steps)
    try:
        settings = _resolve(instructions["settings_class"]).model_validate_json(instructions["settings"])
        _resolve(instructions["entry"])(port, settings)
    except PeerGone:
        return 0
    except SystemExit:
        raise
    except BaseException as error:  # RankLost is no Exception
        reason = missing_extra(error)
        log = structlog.get_logger(__name__)
        if reason is None:
            log.exception("engine_failed")
        else:
            log.error("engine_failed", reason=reason)
        port.send(FrameKind.FATAL, payload=(reason or f"{type(error).__name__}: {error}").encode())
        return 1
    finally:
        port.flush(_LAST_FRAMES_S)
        port.close()
    return 0


def _resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Tearing torch down takes seconds and can crash.
    flush_logs()
    os._exit(exit_code)
