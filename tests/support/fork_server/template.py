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

from specdec.service.process import die_with_parent
from tests.support.fork_server import jobs
from tests.support.fork_server.wire import receive_job

_SERVICE_PACKAGES = ("asyncio", "google.protobuf.json_format", "google.rpc.status_pb2", "grpc.aio", "jinja2", "psutil")
_SERVICE_PACKAGES += ("pydantic_settings", "redis.asyncio", "rich.console", "structlog", "tokenizers", "yaml")
_ENGINE_PACKAGES = ("torch", "numpy", "safetensors.torch", "transformers", "transformers.modeling_utils")
_ENGINE_PACKAGES += ("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama")
PACKAGES = {
    "service": _SERVICE_PACKAGES,
    "gateway": (*_SERVICE_PACKAGES, "fastapi", "uvicorn"),
    "engine": (*_SERVICE_PACKAGES, *_ENGINE_PACKAGES),
}
"""Packages that each kind of template imports; none reads the environment later, as prometheus_client does."""
ENGINE = "specdec.replica.bridge.engine_child"


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
    kind, fd, parent, *_ = argv
    die_with_parent(int(parent))
    for name in PACKAGES[kind]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(fd)) as connection:
        request = serve(connection)
        if request is None:
            return
    job, files = request
    jobs.become(job, files)
    if kind == "engine" and ENGINE not in job.argv:
        _start_engines_from_here()
    jobs.run(job.argv)


def _start_engines_from_here() -> None:
    """Fork a template of engines from the service, so that its engines are the service's children."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    service = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        # Imported after the fork, because prometheus_client reads the environment at its import.
        from specdec.replica.bridge import engine_launch
        from tests.support.fork_server.popen import Forking, Template

        template = Template(ours, dict(os.environ))
        engine_launch.subprocess = Forking(lambda _: template)  # type: ignore[attr-defined]
        return
    ours.close()
    die_with_parent(service)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with the service, and must fork while the service drains
    for fd in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), fd)
    jobs.show_arguments(["template of engines"])
    request = serve(theirs)
    theirs.detach()
    if request is None:
        os._exit(0)
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        signal.signal(number, handler)
    jobs.become(*request)
    jobs.run(request[0].argv)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
