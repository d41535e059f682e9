"""Start an engine process, and describe its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys

from specdec.replica.bridge.engine_child import EngineInstructions
from specdec.service.process import import_path
from specdec.service.settings import ReplicaServiceSettings
from specdec.store.settings import StoreSettings

# An engine uses neither store nor trace collector, so it gets no secrets.
_NOT_FOR_ENGINES = {*StoreSettings.model_fields, "otlp_headers"}


def launch_engine(
    entry: str,
    settings: ReplicaServiceSettings,
    *,
    socket_fd: int,
    pulse_fd: int,
    step_fd: int,
    service: str,
    cores: frozenset[int] | None,
    instance_id: str,
) -> subprocess.Popen[bytes]:
    """Start `specdec.replica.bridge.engine_child` with an entry.

    It is a new program, neither a fork nor multiprocessing's spawn, so it imports nothing of the servicer.

    Args:
        entry: function to run, as module:function.
        settings: the service's.
        socket_fd: its end of the socket, inherited.
        pulse_fd: the memory of its pulse, inherited.
        step_fd: the memory of its current step, inherited.
        service: its name in the log.
        cores: cores it is pinned to; None: not pinned.
        instance_id: id of this start.
    """
    cls = type(settings)
    instructions: EngineInstructions = {
        "entry": entry,
        "settings_class": f"{cls.__module__}:{cls.__qualname__}",
        "settings": settings.model_dump_json(exclude=_NOT_FOR_ENGINES),
        "socket_fd": socket_fd,
        "pulse_fd": pulse_fd,
        "step_fd": step_fd,
        "parent_pid": os.getpid(),
        "cores": None if cores is None else sorted(cores),
        "service": service,
        "log_level": settings.log_level,
        "log_format": settings.log_format,
        "instance_id": instance_id,
    }
    environment = {**os.environ, "PYTHONPATH": import_path()}
    process = subprocess.Popen(
        [sys.executable, "-m", "specdec.replica.bridge.engine_child"],
        stdin=subprocess.PIPE,
        pass_fds=[socket_fd, pulse_fd, step_fd],
        env=environment,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(json.dumps(instructions).encode())
    return process


def describe_exit(code: int) -> str:
    """The meaning of an exit code, which is negative after a signal, for people."""
    if code < 0:
        return f"the engine process was killed by {signal.Signals(-code).name}"
    return f"the engine process exited with code {code}"
