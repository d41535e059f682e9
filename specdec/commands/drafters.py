"""`specdec drafters`: show a target's own drafters, or exchange them while it serves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Annotated, Any

import grpc
import typer
from rich.console import Console

from specdec.client import ClientSettings
from specdec.commands import connection
from specdec.commands.errors import reported_errors
from specdec.commands.views.tables import harmless
from specdec.v1 import common_pb2, target_pb2, target_pb2_grpc
from specdec.wire.errors import from_rpc_error

_DEFAULT_TARGET = "127.0.0.1:50052"
_ANSWER_S = 10.0
"""Seconds for an answer, beyond the time for loading."""


def drafters(
    target: Annotated[
        str,
        typer.Option(
            help="The target's host:port, as `specdec models` lists it.",
            rich_help_panel="Connection",
            callback=connection.parse_address,
        ),
    ] = _DEFAULT_TARGET,
    wanted: Annotated[
        str | None,
        typer.Option(
            "--set",
            help="New drafters, as in the target's setting `drafters`: names separated by commas, or JSON with "
            "options. Drafters with equal options keep running; an empty text removes all. Folders of heads are paths "
            "on the target's machine.",
            metavar="NAME,...",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the drafters as JSON for --set.")] = False,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout-s", help="Seconds for heads to load.", rich_help_panel="Connection", min=0.001),
    ] = 300.0,
    tls: connection.Tls = False,
    tls_ca: connection.TlsCa = None,
    tls_key: connection.TlsKey = None,
    tls_cert: connection.TlsCert = None,
) -> None:
    """Show a target's own drafters, or exchange them while it serves; its output stays the same.

    Only options that differ from their defaults are shown. A restarted target has the drafters of its settings again.
    """
    settings = connection.client_settings(None, tls, tls_ca, tls_key, tls_cert)
    errors = Console(stderr=True)
    with reported_errors(errors, target, "target of this version"), errors.status(f"asking {target}"):
        found = asyncio.run(_ask(target, settings, wanted, timeout_s))
    output = Console(highlight=False)
    if as_json:
        reported = [{"method": name, **options} if options else name for name, options in found]
        output.out(json.dumps(reported), highlight=False)
        return
    for name, options in found:
        parts = [name, *(f"{key}={json.dumps(value)}" for key, value in options.items())]
        output.print(harmless(" ".join(parts)), markup=False, soft_wrap=True)
    if not found:
        output.print("none", style="dim")


async def _ask(
    address: str, settings: ClientSettings, wanted: str | None, timeout_s: float
) -> list[tuple[str, Mapping[str, Any]]]:
    """Name and options of each drafter, after `wanted` was set (None: no change)."""
    options, credentials = settings.channel_options(), settings.credentials()
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        channel = grpc.aio.secure_channel(address, credentials, options=options)
    async with channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        try:
            if wanted is None:
                info = await stub.GetReplicaInfo(common_pb2.GetReplicaInfoRequest(), timeout=_ANSWER_S)
                return _with_options(info.drafters, info.drafter_options)
            request = target_pb2.SetDraftersRequest(
                drafters=wanted, load_timeout_ms=min(round(timeout_s * 1e3), 2**32 - 1)
            )
            answer = await stub.SetDrafters(request, timeout=timeout_s + _ANSWER_S)
            return _with_options(answer.drafters, answer.drafter_options)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


def _with_options(names: Sequence[str], options: Sequence[str]) -> list[tuple[str, Mapping[str, Any]]]:
    # A target of another version may report no options, or too many.
    return [(name, _read(each)) for name, each in zip_longest(names, options[: len(names)], fillvalue="{}")]


def _read(options: str) -> Mapping[str, Any]:
    try:
        found = json.loads(options)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
