"""Flags for the connection to the coordinator, and the client settings made from them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from specdec.client import ClientSettings
from specdec.commands.views.failures import DEFAULT_ADDRESS as DEFAULT_ADDRESS
from specdec.commands.views.failures import check_server_address
from specdec.wire.errors import InvalidRequest
from specdec.wire.tls_files import TlsFile, TlsFiles, TlsFilesBroken, TlsPaths, client_context

API_KEY_VARIABLE = "SPECDEC_API_KEY"
"""Environment variable with the API key; there is no flag, because process lists would show it."""
_PANEL = "Connection"


def parse_address(address: str) -> str:
    """Return the address. Raises typer.BadParameter if it is neither host:port nor a name that gRPC resolves."""
    try:
        return check_server_address(address)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


Address = Annotated[
    str,
    typer.Option(
        envvar="SPECDEC_ADDRESS",
        help="The coordinator's host:port.",
        rich_help_panel=_PANEL,
        callback=parse_address,
    ),
]
TimeoutS = Annotated[
    float | None,
    typer.Option("--timeout-s", help="Seconds until the call's deadline.", rich_help_panel=_PANEL, min=0.001, max=1e9),
]
Tls = Annotated[
    bool,
    typer.Option(
        "--tls",
        help="Use TLS. Without --tls-ca, gRPC's own list of authorities counts, or the file that "
        "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH names.",
        rich_help_panel=_PANEL,
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(help="Authorities to trust (PEM); implies --tls.", rich_help_panel=_PANEL, dir_okay=False),
]
TlsKey = Annotated[
    Path | None,
    typer.Option(help="Client key for mutual TLS (PEM); implies --tls.", rich_help_panel=_PANEL, dir_okay=False),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(help="Client certificate for mutual TLS (PEM).", rich_help_panel=_PANEL, dir_okay=False),
]


def client_settings(
    timeout_s: float | None, tls: bool, tls_ca: Path | None, tls_key: Path | None, tls_cert: Path | None
) -> ClientSettings:
    """Return the client's settings; the API key comes from SPECDEC_API_KEY.

    Raises typer.BadParameter when a file is missing, unreadable or malformed, or the key is no header's value.
    """
    if (tls_key is None) != (tls_cert is None):
        raise typer.BadParameter("--tls-key and --tls-cert go together")
    try:
        files = TlsFiles(
            client_context,
            TlsPaths(
                TlsFile.of("--tls-cert", tls_cert), TlsFile.of("--tls-key", tls_key), TlsFile.of("--tls-ca", tls_ca)
            ),
        ).current()
    except TlsFilesBroken as error:
        # gRPC accepts broken files, and only says later that it cannot connect.
        raise typer.BadParameter(str(error)) from error
    try:
        return ClientSettings(
            timeout_s=timeout_s,
            tls=tls,
            root_certificates=files.authorities,
            client_certificate=None if files.key is None or files.chain is None else (files.key, files.chain),
            api_key=os.environ.get(API_KEY_VARIABLE),
        )
    except InvalidRequest as error:
        raise typer.BadParameter(f"the key in {API_KEY_VARIABLE} has characters that no HTTP header carries") from error
