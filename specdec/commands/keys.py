"""`specdec keys`: make API keys, and the entries of a coordinator's api_keys_file that accept them."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Annotated

import typer
import yaml

from specdec.commands.request_options import standard_input

KEY_PREFIX = "specdec_"
"""Prefix by which secret scanners recognise a leaked key."""
_KEY_BYTES = 32
_LEAST_KEY_CHARS = 32
_ID_OTHERS, _MOST_ID_CHARS = "._-", 64
_TENANT_OTHERS, _MOST_TENANT_CHARS = "._@:/-", 128

keys = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Make API keys for a coordinator with api_keys_file."
)


@keys.command()
def new(
    id: Annotated[str, typer.Option("--id", help="Name of the key, for people and logs.")],
    tenant: Annotated[str, typer.Option(help="Tenant that owns the key.")],
) -> None:
    """Print a new random key, which is stored nowhere, and the file's entry with its hash."""
    _check("--id", id, _ID_OTHERS, _MOST_ID_CHARS)
    _check("--tenant", tenant, _TENANT_OTHERS, _MOST_TENANT_CHARS)
    key = KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    typer.echo("Give this key to the client; it is not shown again:", err=True)
    typer.echo(key)
    typer.echo("Add this entry under `keys:` in the coordinator's api_keys_file:", err=True)
    entry = {"id": id, "tenant": tenant, "sha256": _sha256(key)}
    typer.echo(yaml.safe_dump([entry], sort_keys=False), nl=False)


@keys.command("hash")
def hash_() -> None:
    """Read a key from standard input and print its hash."""
    key = standard_input().strip()
    if len(key) < _LEAST_KEY_CHARS or any(character.isspace() for character in key):
        raise typer.BadParameter(
            f"a key is one word of at least {_LEAST_KEY_CHARS} random characters, as `specdec keys new` makes them",
            param_hint="standard input",
        )
    typer.echo(_sha256(key))


def _sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _check(flag: str, value: str, others: str, most: int) -> None:
    if not re.fullmatch(rf"[A-Za-z0-9{re.escape(others)}]{{1,{most}}}", value):
        raise typer.BadParameter(f"{value!r} is not 1 to {most} letters, digits and any of {others}", param_hint=flag)
