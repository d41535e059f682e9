"""Flags that say how to reach the coordinator, and the client they make."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from specdec.client import ClientSettings

DEFAULT_ADDRESS = "127.0.0.1:50051"
API_KEY_VARIABLE = "SPECDEC_API_KEY"
"""There is no flag for the key: process lists would show it."""
_PANEL = "Connection"

Address = Annotated[
    str,
    typer.Option(envvar="SPECDEC_ADDRESS", help="The coordinator's host:port.", rich_help_panel=_PANEL),
]
TimeoutS = Annotated[
    float | None,
    typer.Option("--timeout-s", help="Deadline of the call, in seconds.", rich_help_panel=_PANEL, min=0.001),
]
Tls = Annotated[
    bool,
    typer.Option(
        "--tls",
        help="Use TLS. Without --tls-ca it trusts whom gRPC trusts: a list of its own, or the file that "
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

    Raises typer.BadParameter when a file is missing or cannot be read.
    """
    if (tls_key is None) != (tls_cert is None):
        raise typer.BadParameter("--tls-key and --tls-cert go together")
    pair = None
    if tls_key is not None and tls_cert is not None:
        pair = (_read(tls_key, "--tls-key"), _read(tls_cert, "--tls-cert"))
    return ClientSettings(
        timeout_s=timeout_s,
        tls=tls,
        root_certificates=_read(tls_ca, "--tls-ca") if tls_ca is not None else None,
        client_certificate=pair,
        api_key=os.environ.get(API_KEY_VARIABLE),
    )


def _read(path: Path, flag: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror}", param_hint=flag) from error
