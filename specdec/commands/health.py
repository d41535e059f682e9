"""`specdec health`: ask a service whether it can serve, for health checks of containers."""

from __future__ import annotations

import http
import http.client
from typing import Annotated

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.commands.connection import DEFAULT_ADDRESS, parse_address
from specdec.commands.errors import EXIT_CODES, EXIT_FAILURE, connect_failure

_SERVING = health_pb2.HealthCheckResponse.SERVING
_HTTP = "http://"


def _address(value: str) -> str:
    return _HTTP + parse_address(value.removeprefix(_HTTP)) if value.startswith(_HTTP) else parse_address(value)


def health(
    address: Annotated[
        str,
        typer.Option(
            help="host:port that answers in plaintext, such as a service's health_port; http://host:port of a gateway.",
            callback=_address,
        ),
    ] = DEFAULT_ADDRESS,
    service: Annotated[str, typer.Option(help="Full name of a gRPC service; empty: all of them.")] = "",
    timeout_s: Annotated[float, typer.Option("--timeout-s", help="Longest wait, in seconds.", min=0.001)] = 2.0,
) -> None:
    """Ask a service whether it can serve: exit code 0 if it is SERVING, 1 if not, for health checks.

    It speaks plaintext only: where the main port has TLS, ask the health port. A gateway is asked over HTTP,
    and has no services to name.
    """
    if address.startswith(_HTTP):
        _check_http(address.removeprefix(_HTTP), timeout_s)
        return
    request = health_pb2.HealthCheckRequest(service=service)
    # A proxy from the environment is for the way out, not for a probe.
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]
        try:
            status: int = check(request, timeout=timeout_s).status
        except grpc.RpcError as error:
            if not isinstance(error, grpc.Call):
                raise
            why = connect_failure(error.details() or "") or error.details() or f"no service {service!r} there"
            typer.echo(f"{address}: {error.code().name}: {why}", err=True)
            raise typer.Exit(EXIT_CODES.get(error.code(), EXIT_FAILURE)) from None
    typer.echo(f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(status)}")
    if status != _SERVING:
        raise typer.Exit(EXIT_FAILURE)


def _check_http(address: str, timeout_s: float) -> None:
    """GET /health: 200 is SERVING, 503 is not."""
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        code = grpc.StatusCode.UNAVAILABLE
        typer.echo(f"{address}: {code.name}: {str(error) or type(error).__name__}", err=True)
        raise typer.Exit(EXIT_CODES[code]) from None
    finally:
        connection.close()
    is_serving = status == http.HTTPStatus.OK
    typer.echo(f"{address}: {'SERVING' if is_serving else f'NOT_SERVING ({status})'}")
    if not is_serving:
        raise typer.Exit(EXIT_FAILURE)
