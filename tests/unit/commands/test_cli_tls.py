"""The `specdec` command against a coordinator that speaks TLS."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from tests.support.servers.certificates import Authority
from tests.support.services.fake_coordinator import TEXT, running_fake_coordinator


@dataclass(frozen=True, slots=True)
class SecureCommand:
    """Runs `specdec generate`, whose coordinator demands a client certificate; the files are what a client has."""

    address: str
    authority: Path
    other_authority: Path
    key: Path
    certificate: Path

    def __call__(self, *flags: str, trusted: Path) -> subprocess.CompletedProcess[str]:
        """Run it where gRPC trusts, by default, the authority in `trusted`."""
        # gRPC reads the variable once in a process.
        environment = {**os.environ, "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(trusted), "COLUMNS": "200"}
        arguments = [sys.executable, "-m", "specdec.commands.main", "generate", "x", "--address", self.address, *flags]
        return subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)

    @property
    def pair(self) -> tuple[str, ...]:
        return ("--tls-key", str(self.key), "--tls-cert", str(self.certificate))


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureCommand]:
    folder = tmp_path_factory.mktemp("certificates")
    authority = Authority("the authority")
    server, client = authority.issue("server"), authority.issue("client")
    contents = {
        "authority": authority.certificate,
        "other": Authority("another").certificate,
        "key": client.key,
        "chain": client.chain,
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    credentials = grpc.ssl_server_credentials(
        [(server.key, server.chain)], authority.certificate, require_client_auth=True
    )
    with running_fake_coordinator(credentials) as (_, address):
        yield SecureCommand(address, *(folder / name for name in contents))


def test_tls_alone_trusts_the_authorities_that_grpc_trusts(command: SecureCommand) -> None:
    result = command("--tls", *command.pair, trusted=command.authority)
    assert (result.returncode, result.stdout) == (0, TEXT + "\n"), result.stderr


def test_a_client_certificate_implies_tls(command: SecureCommand) -> None:
    result = command(*command.pair, trusted=command.authority)
    assert (result.returncode, result.stdout) == (0, TEXT + "\n"), result.stderr


def test_an_authority_of_ones_own_stands_in_for_those(command: SecureCommand) -> None:
    result = command("--tls-ca", str(command.authority), *command.pair, trusted=command.other_authority)
    assert (result.returncode, result.stdout) == (0, TEXT + "\n"), result.stderr


def test_a_server_of_an_authority_that_is_not_trusted_is_not_talked_to(command: SecureCommand) -> None:
    result = command("--tls", *command.pair, trusted=command.other_authority)
    assert result.returncode == 6
    assert "is not from a trusted authority (--tls-ca)" in result.stderr
    assert result.stderr.startswith("error: UNAVAILABLE\n"), "gRPC's own log lines are left out"


def test_without_tls_a_server_that_wants_it_is_told_apart(command: SecureCommand) -> None:
    result = command(trusted=command.authority)
    assert result.returncode == 6
    assert "it needs TLS" in result.stderr
