"""HTTPS at a gateway, with files that are renewed under it."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
from cryptography import x509

from tests.support.servers.certificates import Authority, SecretVolume
from tests.support.services.gateways import gateway

pytestmark = pytest.mark.timeout(60)


async def shown_serial(port: int, trusted: ssl.SSLContext) -> int:
    """Of the certificate that a new connection is shown, on which /version is answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusted, server_hostname="localhost")
    writer.write(b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return x509.load_der_x509_certificate(shown).serial_number


async def test_new_connections_get_the_renewed_certificate(tmp_path: Path) -> None:
    authority = Authority("ours")
    first, second = (authority.issue("gateway", dns_names=["localhost"]) for _ in range(2))
    volume = SecretVolume(tmp_path / "secret", first, authority.certificate)
    trusted = ssl.create_default_context(cadata=authority.certificate.decode())
    async with gateway("127.0.0.1:1", tls_dir=volume.folder) as one:
        assert await shown_serial(one.port, trusted) == first.serial_number
        volume.write(second, authority.certificate)
        assert await shown_serial(one.port, trusted) == second.serial_number
        with pytest.raises(ssl.SSLCertVerificationError):
            await shown_serial(one.port, ssl.create_default_context())
