"""`specdec models`: the served model and the state of every replica."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from google.protobuf import json_format
from rich.console import Console

from specdec.client import Client, ClientSettings
from specdec.commands import connection
from specdec.commands.errors import reported_errors
from specdec.commands.views import tables
from specdec.commands.views.tables import cell, harmless
from specdec.v1 import coordinator_pb2


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print two lines of JSON: model, replicas.")] = False,
    address: connection.Address = connection.DEFAULT_ADDRESS,
    timeout_s: connection.TimeoutS = 10.0,
    tls: connection.Tls = False,
    tls_ca: connection.TlsCa = None,
    tls_key: connection.TlsKey = None,
    tls_cert: connection.TlsCert = None,
) -> None:
    """Show the served model and the state of every replica. An API key is read from SPECDEC_API_KEY."""
    settings = connection.client_settings(timeout_s, tls, tls_ca, tls_key, tls_cert)
    errors = Console(stderr=True)
    with reported_errors(errors, address), errors.status(f"asking {address}"):
        info, status = asyncio.run(ask(address, settings))
    show(Console(highlight=False), info, status, as_json=as_json)


def show(
    output: Console,
    info: coordinator_pb2.GetModelInfoResponse,
    status: coordinator_pb2.GetStatusResponse,
    *,
    as_json: bool = False,
) -> None:
    """Print a coordinator's answers."""
    if as_json:
        for message in (info, status):
            output.out(json_format.MessageToJson(message, indent=None, preserving_proto_field_name=True))
        return
    output.print(tables.model_table(info))
    output.print(tables.replicas_table(status))
    if status.coordinators:
        output.print(tables.coordinators_table(status))
    if details := tables.replica_details(status):
        output.print(details)
    if status.num_left_out:
        output.print(f"{status.num_left_out} more did not fit into the answer", style="yellow")
    output.print(
        f"{status.num_running} requests run, of at most {status.max_running} choices; "
        f"{status.num_waiting} of at most {status.max_waiting} wait; version {harmless(status.version)}",
        style="dim",
        markup=False,
    )
    for notice in status.degraded:
        output.print(cell(f"degraded: {notice}", style="yellow"))


async def ask(
    address: str, settings: ClientSettings
) -> tuple[coordinator_pb2.GetModelInfoResponse, coordinator_pb2.GetStatusResponse]:
    """A coordinator's model and status. Raises the typed errors of `specdec.wire.errors`."""
    async with Client(address, settings) as client:
        return await client.model_info(), await client.status()
