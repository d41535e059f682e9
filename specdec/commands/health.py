"""`specdec health`: ask a service whether it can serve, for health checks of containers.

A container runs it every few seconds, so it imports little: no typer, no gRPC for HTTP, and protobuf only for a named
service or an answer other than SERVING.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from specdec.commands.views.failures import (
    DEFAULT_ADDRESS,
    EXIT_CODES,
    EXIT_FAILURE,
    check_server_address,
    connect_failure,
)
from specdec.service.standstill import Standstill
from specdec.service.texts import fault_of

_HTTP = "http://"
_HTTP_OK = 200
_LEAST_TIMEOUT_S, _MOST_TIMEOUT_S = 0.001, 1e6
_HUNG_S = 3.0
_SILENT = EXIT_CODES["DEADLINE_EXCEEDED"]
_SERVING = b"\x08\x01"
"""Encoded HealthCheckResponse with SERVING."""


def probe(arguments: Sequence[str]) -> int:
    """Ask the service, print the answer and return the exit code; raises SystemExit for --help and bad flags."""
    asked = _parser().parse_args(arguments)
    answer = _probe(asked)
    if answer == _SILENT and asked.end_hung:
        end_hung(lambda: _probe(asked) != _SILENT)
    return answer


def end_hung(has_answered: Callable[[], bool]) -> None:
    """Kill the children of process 1, a container's init, unless one answers or only lacks a processor.

    It returns after about `_HUNG_S`, or at the first answer.
    """
    services = [pid for pid in _children(1) if pid != os.getpid()]
    standstill = Standstill(_HUNG_S)
    while services and not standstill.is_hung(services[0], time.monotonic()):
        if has_answered():
            return
    for pid in services:
        sys.stderr.write(f"process {pid} does not answer and is killed\n")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _children(parent: int, proc: Path = Path("/proc")) -> list[int]:
    """The processes whose parent is `parent`; some kernels do not list them, but tell each process's parent."""
    with contextlib.suppress(OSError):
        return [int(pid) for pid in (proc / f"{parent}/task/{parent}/children").read_text(encoding="ascii").split()]
    children = []
    for entry in proc.iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                # Behind the name, which may hold any character: state and parent.
                fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                children += [int(entry.name)] * (int(fields[1]) == parent)
    return sorted(children)


def _probe(asked: argparse.Namespace) -> int:
    if asked.address.startswith(_HTTP):
        return _probe_http(asked.address.removeprefix(_HTTP), asked.timeout_s)
    return _probe_grpc(asked.address, asked.service, asked.timeout_s)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "specdec health",
        description="Ask a service whether it can serve, for health checks: exit code 0 if it is SERVING. "
        "The command speaks plaintext only: where the main port has TLS, ask the health port. A gateway is asked over "
        "HTTP and has no --service.",
        epilog="Each flag has a variable, such as SPECDEC_HEALTH_ADDRESS.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--address",
        type=_address,
        default=os.environ.get("SPECDEC_HEALTH_ADDRESS") or DEFAULT_ADDRESS,
        help="host:port that answers in plaintext, such as a service's health_port; for a gateway http://host:port. "
        f"[default: {DEFAULT_ADDRESS}]",
    )
    parser.add_argument(
        "--service",
        type=_text,
        default=os.environ.get("SPECDEC_HEALTH_SERVICE", ""),
        help="Full name of a gRPC service; empty: the whole server.",
    )
    parser.add_argument(
        "--timeout-s",
        type=_timeout_s,
        default=os.environ.get("SPECDEC_HEALTH_TIMEOUT_S") or "2",
        metavar="SECONDS",
        help="Seconds to wait for the answer. [default: 2]",
    )
    parser.add_argument(
        "--end-hung",
        action="store_true",
        default=os.environ.get("SPECDEC_HEALTH_END_HUNG") == "true",
        help="In a container with an init process: kill a service that takes connections and answers none for 3 s, so "
        "that the container is restarted.",
    )
    return parser


def _address(value: str) -> str:
    try:
        check_server_address(value.removeprefix(_HTTP))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return value


def _text(value: str) -> str:
    if (fault := fault_of(value)) is not None:
        raise argparse.ArgumentTypeError(f"{value!r} {fault}")
    return value


def _timeout_s(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number") from None
    if not _LEAST_TIMEOUT_S <= seconds <= _MOST_TIMEOUT_S:
        raise argparse.ArgumentTypeError(f"{value} is not from {_LEAST_TIMEOUT_S:g} to {_MOST_TIMEOUT_S:g}")
    return seconds


def _probe_grpc(address: str, service: str, timeout_s: float) -> int:
    import grpc

    request = _request(service) if service else b""
    # A proxy from the environment serves calls to other hosts, not a health check.
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            answer = check(request, timeout=timeout_s)
        except grpc.RpcError as error:
            if not isinstance(error, grpc.Call):
                raise
            code = error.code().name
            why = connect_failure(error.details() or "") or error.details() or f"no service {service!r} there"
            sys.stderr.write(f"{address}: {code}: {why}\n")
            return EXIT_CODES.get(code, EXIT_FAILURE)
    is_serving = answer == _SERVING
    sys.stdout.write(f"{address}: {'SERVING' if is_serving else _status(answer)}\n")
    return 0 if is_serving else EXIT_FAILURE


def _request(service: str) -> bytes:
    from grpc_health.v1 import health_pb2

    return health_pb2.HealthCheckRequest(service=service).SerializeToString()


def _status(answer: bytes) -> str:
    from google.protobuf.message import DecodeError
    from grpc_health.v1 import health_pb2

    try:
        status = health_pb2.HealthCheckResponse.FromString(answer).status
        return health_pb2.HealthCheckResponse.ServingStatus.Name(status)
    except (DecodeError, ValueError):
        return "not a health check's answer"


def _probe_http(address: str, timeout_s: float) -> int:
    """GET /health: 200 is SERVING, 503 is not."""
    import http.client

    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except TimeoutError:
        sys.stderr.write(f"{address}: DEADLINE_EXCEEDED: no answer within {timeout_s:g} s\n")
        return _SILENT
    except (OSError, http.client.HTTPException) as error:
        sys.stderr.write(f"{address}: UNAVAILABLE: {str(error) or type(error).__name__}\n")
        return EXIT_CODES["UNAVAILABLE"]
    finally:
        connection.close()
    is_serving = status == _HTTP_OK
    sys.stdout.write(f"{address}: {'SERVING' if is_serving else f'NOT_SERVING ({status})'}\n")
    return 0 if is_serving else EXIT_FAILURE
