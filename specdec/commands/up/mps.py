"""NVIDIA's Multi-Process Service for engines that share a GPU: their kernels run side by side, the target's first.

Variables and commands are explained on NVIDIA's page:
https://docs.nvidia.com/deploy/mps/appendix-tools-and-interface-reference.html
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specdec.commands.up.service_process import ServiceSpec

CONTROL = "nvidia-cuda-mps-control"
PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
LOG_DIRECTORY = "CUDA_MPS_LOG_DIRECTORY"
CLIENT_PRIORITY = "CUDA_MPS_CLIENT_PRIORITY"
BELOW_NORMAL = "1"
SWITCH = "SPECDEC_UP_MPS"
"""Variable that switches MPS off in all commands."""
_POLL_S = 0.05
_LOG_NAME = "control.txt"


_PROBE = """
import ctypes, sys
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
for name, *arguments in (
    ("cuInit", 0),
    ("cuDeviceGet", ctypes.byref(device), int(sys.argv[1])),
    ("cuDevicePrimaryCtxRetain", ctypes.byref(context), device),
    ("cuCtxSetCurrent", context),
    ("cuCtxSynchronize",),
):
    if status := getattr(cuda, name)(*arguments):
        sys.exit(f"{name} returned {status}")
"""
"""Program of a client without torch, whose import could take longer than the probe may."""


class MpsUnusable(Exception):
    """MPS cannot be used; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MpsTimeouts:
    """Times in seconds."""

    start_s: float = 10.0
    """Until the daemon answers and its server runs."""
    stop_s: float = 10.0
    """From `quit` until a daemon that still runs is killed."""
    probe_s: float = 30.0
    """Until a first client has a context on the GPU, which can hang for ever under MPS."""


def shared_gpus(specs: Sequence[ServiceSpec]) -> list[int]:
    """Numbers of the GPUs that more than one service computes on."""
    counts = Counter(gpu for spec in specs for gpu in spec.gpus)
    return sorted(gpu for gpu, count in counts.items() if count > 1)


def mps_is_wanted(environment: Mapping[str, str]) -> bool:
    """Value of `SPECDEC_UP_MPS`, for commands without a flag; true where it is not set."""
    return environment.get(SWITCH, "1").strip().lower() not in ("0", "false", "no", "off", "f", "n")


@contextlib.contextmanager
def shared_by_mps(
    specs: Sequence[ServiceSpec],
    tell: Callable[[str], None],
    *,
    is_wanted: bool = True,
    environment: Mapping[str, str] | None = None,
    timeouts: MpsTimeouts | None = None,
    probe: Sequence[str] = (sys.executable, "-c", _PROBE),
) -> Iterator[list[ServiceSpec]]:
    """Yield the services to start, as clients of MPS if they share a GPU; the daemon ends with the block.

    A running daemon is used, and left running. If none runs and none can be started, or if a first client fails or
    hangs, the services are no clients of any daemon: they take turns on the GPU. They do so as well after the daemon
    ends before them, which restarts them once.

    Args:
        specs: the services; the block must end them.
        tell: called with one line for people if a GPU is shared.
        is_wanted: False: the services are no clients of any daemon.
        environment: None: this process's.
        timeouts: limits for the daemon.
        probe: command of a client, which gets a GPU's number and makes a context on that GPU.
    """
    gpus = shared_gpus(specs)
    if not gpus:
        yield list(specs)
        return
    environment = dict(os.environ if environment is None else environment)
    timeouts = timeouts or MpsTimeouts()
    where = f"GPU {', '.join(map(str, gpus))} is shared"
    with contextlib.ExitStack() as stack:
        try:
            if not is_wanted:
                raise MpsUnusable("NVIDIA MPS is switched off")
            control = shutil.which(CONTROL, path=environment.get("PATH"))
            if control is None:
                raise MpsUnusable(f"{CONTROL} (NVIDIA MPS) is not on the PATH")
            seen = environment
            # Clients number the devices that the daemon sees, so it must see all of them.
            environment = {name: value for name, value in environment.items() if name != "CUDA_VISIBLE_DEVICES"}
            own: dict[str, str] = {}
            how = "that runs already"
            if not _answers(control, environment, timeouts.start_s):
                own = stack.enter_context(_running_daemon(control, environment, timeouts))
                how = "started for it"
            for gpu in gpus:
                _try_client([*probe, str(gpu)], {**seen, **own}, timeouts.probe_s)
        except MpsUnusable as error:
            stack.close()
            tell(f"{where}: its engines take turns, as {error}.")
            nowhere = stack.enter_context(tempfile.TemporaryDirectory(prefix="specdec-no-mps-"))
            yield [_as_no_client(spec, nowhere) for spec in specs]
            return
        tell(f"{where}: NVIDIA MPS, {how}, runs kernels of its engines side by side, the target's first.")
        yield [_as_client(spec, own, environment) for spec in specs]


def _as_no_client(spec: ServiceSpec, nowhere: str) -> ServiceSpec:
    """The service with a folder without a daemon: otherwise it is a client of the default folder's."""
    return replace(spec, environment={**spec.environment, PIPE_DIRECTORY: nowhere}) if spec.gpus else spec


def _try_client(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> None:
    """Run one client. Raises MpsUnusable if it fails or hangs; in the driver it may outlive its kill."""
    client = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=dict(environment)
    )
    try:
        _, said = client.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        client.kill()
        remedy = f"end its daemon (echo quit | {CONTROL}) and start again"
        raise MpsUnusable(f"a first client of NVIDIA MPS hung for {timeout_s:g} s; {remedy}") from error
    if client.returncode:
        reason = said.decode(errors="replace").splitlines()[-1:] or [f"exit code {client.returncode}"]
        raise MpsUnusable(f"a first client of NVIDIA MPS failed: {reason[0]}")


def _as_client(spec: ServiceSpec, own: Mapping[str, str], environment: Mapping[str, str]) -> ServiceSpec:
    if not spec.gpus:
        return spec
    added = dict(own)
    if spec.role == "draft" and CLIENT_PRIORITY not in environment:
        added[CLIENT_PRIORITY] = BELOW_NORMAL
    return replace(spec, environment={**spec.environment, **added})


@contextlib.contextmanager
def _running_daemon(control: str, environment: Mapping[str, str], timeouts: MpsTimeouts) -> Iterator[dict[str, str]]:
    """Start a daemon with its own folders; yields the variables by which clients find it. Raises MpsUnusable."""
    folder = Path(tempfile.mkdtemp(prefix="specdec-mps-"))  # short: a socket's path has at most 107 characters
    own = {PIPE_DIRECTORY: str(folder / "pipe"), LOG_DIRECTORY: str(folder / "log")}
    environment = {**environment, **own}
    for path in own.values():
        Path(path).mkdir()
    with (folder / _LOG_NAME).open("wb") as log:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "specdec.service.process", str(os.getpid()), "", control, "-f"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        _wait_for_server(control, environment, daemon, folder / _LOG_NAME, timeouts.start_s)
        yield own
    finally:
        if daemon.poll() is None:
            _ask(control, environment, "quit", timeouts.stop_s)
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(timeouts.stop_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(daemon.pid, signal.SIGKILL)  # its server may still run
        daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for_server(
    control: str, environment: Mapping[str, str], daemon: subprocess.Popen[bytes], log: Path, timeout_s: float
) -> None:
    """Return when a server of this user runs; otherwise the first client would start it. Raises MpsUnusable."""
    end_s, asked = time.monotonic() + timeout_s, False
    while True:
        if daemon.poll() is not None:
            said = log.read_text(errors="replace").splitlines()
            raise MpsUnusable(
                f"{CONTROL} ended with exit code {daemon.returncode}: {(said or ['it said nothing'])[-1]}"
            )
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise MpsUnusable(f"{CONTROL} had no server running within {timeout_s:g} s")
        command = "get_server_list" if asked else f"start_server -uid {os.getuid()}"
        answer = _ask(control, environment, command, left_s)
        if answer is not None:
            if asked and answer.strip():
                return
            asked = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(_POLL_S)


def _answers(control: str, environment: Mapping[str, str], timeout_s: float) -> bool:
    return _ask(control, environment, "get_server_list", timeout_s) is not None


def _ask(control: str, environment: Mapping[str, str], command: str, timeout_s: float) -> str | None:
    """The daemon's answer; None if no daemon runs, or it takes too long."""
    try:
        done = subprocess.run(
            [control],
            input=f"{command}\n",
            capture_output=True,
            text=True,
            env=dict(environment),
            timeout=max(timeout_s, _POLL_S),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
