"""`specdec models`: what is loaded where."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from google.protobuf import json_format
from rich.console import Console

from specdec.cli import connection
from specdec.cli.errors import reported_errors
from specdec.cli.views import tables
from specdec.client import Client, ClientSettings
from specdec.v1 import coordinator_pb2


def models(
    as_json: Annotated[
        bool, typer.Option("--json", envvar="SPECDEC_MODELS_JSON", help="Print two lines of JSON.")
    ] = False,
    address: connection.Address = connection.DEFAULT_ADDRESS,
    timeout_s: connection.TimeoutS = 10.0,
    tls: connection.Tls = False,
    tls_ca: connection.TlsCa = None,
    tls_key: connection.TlsKey = None,
    tls_cert: connection.TlsCert = None,
) -> None:
    """Show what is served, and what is loaded where. An API key is read from SPECDEC_API_KEY."""
    settings = connection.client_settings(timeout_s, tls, tls_ca, tls_key, tls_cert)
    errors = Console(stderr=True)
    with reported_errors(errors, address), errors.status(f"asking {address}"):
        info, status = asyncio.run(_ask(address, settings))
    output = Console(highlight=False)
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
    output.print(
        f"{status.num_running} of {status.max_running} requests run, "
        f"{status.num_waiting} of {status.max_waiting} wait; version {status.version}",
        style="dim",
    )
    for notice in status.degraded:
        output.print(f"degraded: {notice}", style="yellow", markup=False)


async def _ask(
    address: str, settings: ClientSettings
) -> tuple[coordinator_pb2.GetModelInfoResponse, coordinator_pb2.GetStatusResponse]:
    async with Client(address, settings) as client:
        return await client.model_info(), await client.status()
