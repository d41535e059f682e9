"""The process that forks: `python -m tests.support.fork_server.template KIND SOCKET_FD PADDING`.

The process reads jobs from its socket, and ends when that is closed. It has one thread and opens no other files.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

import prometheus_client

from specdec.service.process import die_with_parent
from tests.support.fork_server import jobs
from tests.support.fork_server.wire import receive_job

_SERVICE_PACKAGES = ("asyncio", "google.protobuf.json_format", "google.rpc.status_pb2", "grpc.aio", "jinja2", "psutil")
_SERVICE_PACKAGES += ("pydantic_settings", "redis.asyncio", "rich.console", "structlog", "tokenizers", "yaml")
_REPLICA = "specdec.replica.bridge.replica_service"
_ENGINE_PACKAGES = ("torch", "numpy", "safetensors.torch", "transformers", "transformers.modeling_utils")
_ENGINE_PACKAGES += ("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama")
_ENGINE_PACKAGES += (_REPLICA, "specdec.draft_service.model_process", "specdec.target_service.model_process")
PACKAGES = {
    "service": (*_SERVICE_PACKAGES, "specdec.coordinator.supervisor"),
    "gateway": (*_SERVICE_PACKAGES, "fastapi", "uvicorn", "specdec.gateway.service"),
    "engine": (*_SERVICE_PACKAGES, *_ENGINE_PACKAGES),
}
"""Packages and modules that each kind of template imports; prometheus_client alone reads the environment then."""
ENGINE = "specdec.replica.bridge.engine_child"
REPLICAS = ("specdec.target_service", "specdec.draft_service", "tests.support.services.deadly_target")
COMMAND = "specdec.commands.main"
PROBE = "specdec.commands.tune.probe"
_ENGINES = "specdec.replica.bridge.engine_launch"
_RANKS = "specdec.replica.ranks.processes"
_STARTED_BY = {
    COMMAND: ("specdec.commands.up.service_process", "specdec.commands.tune.probe_processes", _ENGINES),
    **dict.fromkeys(REPLICAS, (_ENGINES, _RANKS)),
    ENGINE: (_RANKS,),
}
"""Modules that start processes, by the module of the process in which they do."""


def serve(connection: socket.socket) -> tuple[jobs.Job, list[int]] | None:
    """Fork for each job. Returns the job in the forked process, and None here when the socket is closed."""
    while (request := receive_job(connection)) is not None:
        job, files = request
        read_end, write_end = os.pipe()
        middle = os.fork()
        if middle == 0:
            if os.fork():
                os._exit(0)
            jobs.show_arguments([sys.executable, *job.argv])
            os.write(write_end, str(os.getpid()).encode())
            return job, files
        os.waitpid(middle, 0)  # from here on the child is an orphan, which the requester has adopted
        connection.send(os.read(read_end, 64))
        for fd in (read_end, write_end, *files):
            os.close(fd)
    return None


def main(argv: Sequence[str]) -> None:
    """Import packages, fork for jobs, and run a job in each forked process."""
    kind, fd, *_ = argv
    for name in PACKAGES[kind]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(fd)) as connection:
        request = serve(connection)
        if request is None:
            return
    _run(kind, *request)


def _run(kind: str, job: jobs.Job, files: list[int]) -> None:
    jobs.become(job, files)
    prometheus_client.values.ValueClass = prometheus_client.values.get_value_class()
    if COMMAND in job.argv:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background shell's processes ignore
    if kind == "engine" and (starter := next((name for name in _STARTED_BY if name in job.argv), None)):
        _start_processes_from_here(_STARTED_BY[starter])
    jobs.run(job.argv)


def _start_processes_from_here(starts: Sequence[str]) -> None:
    """Fork a template from a command, service or engine, so that what its modules `starts` start are its children."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        from tests.support.fork_server.popen import Forking, Template

        template = Template(ours, dict(os.environ))
        for name in starts:
            module: Any = importlib.import_module(name)
            module.subprocess = Forking(lambda _: template)
        return
    ours.close()
    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with the service, and must fork while the service drains
    for fd in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), fd)
    jobs.show_arguments(["template of processes"])
    request = serve(theirs)
    theirs.detach()
    if request is None:
        os._exit(0)
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        signal.signal(number, handler)
    _run("engine", *request)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
