"""A subprocess.Popen whose processes come from templates."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.support.fork_server.jobs import STARTER, Job
from tests.support.fork_server.wire import send_job

_PR_SET_CHILD_SUBREAPER = 36
_OWN_ENVIRONMENT = (
    "SPECDEC_",
    "GRPC_VERBOSITY",
    "PYTHONUNBUFFERED",
    "PROMETHEUS_MULTIPROC_DIR",
    "PYTHONPATH",
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
    "NCCL_SOCKET_IFNAME",
    "OTEL_",
    "XDG_CACHE_HOME",
)
"""Prefixes of variables that a template's imports do not read, or for gRPC's log and Hugging Face's cache only; others
rule it out.

Torch and the engine set the caches' and NCCL's in the tests' own process, where they stay.
"""
_ARGUMENT_ROOM = 4096
_spawning = threading.Lock()


class Template:
    """Connection to a template, from the process whose children the template makes."""

    def __init__(self, connection: socket.socket, environment: Mapping[str, str]) -> None:
        """`environment`: the template's environment variables."""
        self._connection = connection
        self._environment = environment

    def can_make(self, environment: Mapping[str, str]) -> bool:
        """Whether a process with this environment would have imported the same."""
        names = {*environment, *self._environment}
        return all(
            name.startswith(_OWN_ENVIRONMENT) for name in names if environment.get(name) != self._environment.get(name)
        )

    def make(self, job: Job, files: list[int]) -> int:
        """Start a process as a child of this one; returns its id."""
        with _spawning, _adopting():
            return send_job(self._connection, job, files)

    @classmethod
    def start(cls, kind: str) -> Template:
        """Start a template of a kind. It ends with this process, which closes the socket, and not with the thread."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [kind, str(theirs.fileno()), "." * _ARGUMENT_ROOM]
            command = [sys.executable, "-m", f"{__package__}.template", *words]
            subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True)
        return cls(ours, dict(os.environ))


class ForkedPopen(subprocess.Popen[bytes]):
    """A Popen whose process a template makes; only for `python -m` with pipes or files."""

    def __init__(self, template: Template, command: list[str], **options: Any) -> None:
        self._template = template
        super().__init__(command, **options)

    def _execute_child(  # type: ignore[no-untyped-def]  # CPython's method that forks and executes, since 3.2
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
        start_new_session, process_group,
    ) -> None:  # fmt: skip
        standard = [
            p2cread if p2cread != -1 else 0,
            c2pwrite if c2pwrite != -1 else 1,
            errwrite if errwrite != -1 else 2,
        ]
        environment = dict(os.environ if env is None else env)
        numbers = (0, 1, 2, *pass_fds)
        job = Job(tuple(args[1:]), environment, cwd or os.getcwd(), numbers, os.getpid(), bool(start_new_session))
        self.pid = self._template.make(job, [*standard, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


class Forking:
    """The subprocess module with a Popen that uses templates where it can."""

    def __init__(self, find: Callable[[str], Template | None]) -> None:
        """`find`: from a module to its template, or None."""
        self._find = find

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:  # subprocess's name
        """Start a process from a template if it runs a module and a template has its environment, else execute it."""
        environment = os.environ if options.get("env") is None else options["env"]
        if command[:2] == [sys.executable, "-m"]:
            module = command[5] if command[2] == STARTER else command[2]
            template = self._find(module)
            if template is not None and template.can_make(environment):
                with contextlib.suppress(ConnectionError):  # the template is gone, killed by its machine
                    return ForkedPopen(template, command, **options)
        return subprocess.Popen(command, **options)


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Within the context, this process adopts its orphaned descendants in init's place."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
