"""Certificates of a test authority, as files for services and clients."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from specdec.wire.tls_files import TlsPaths

_LOOPBACK = ipaddress.ip_address("127.0.0.1")


@dataclass(frozen=True, slots=True)
class Certificate:
    """A key and its certificate chain, as PEM."""

    key: bytes
    chain: bytes

    @property
    def serial_number(self) -> int:
        """Serial number, which differs between certificates with the same names."""
        return x509.load_pem_x509_certificate(self.chain).serial_number


class Authority:
    """Signs certificates for 127.0.0.1 and given DNS names."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _x509_name(name)
        basic = x509.BasicConstraints(ca=True, path_length=0)
        builder = _builder(self._name, self._name, self._key, timedelta(days=1)).add_extension(basic, critical=True)
        self.certificate = _pem(builder.sign(self._key, hashes.SHA256()))

    def issue(
        self, common_name: str, *, dns_names: Sequence[str] = (), valid_for: timedelta = timedelta(hours=1)
    ) -> Certificate:
        """A new key and certificate; a negative `valid_for` makes an expired one."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.IPAddress(_LOOPBACK), *map(x509.DNSName, dns_names)]
        builder = _builder(_x509_name(common_name), self._name, key, valid_for)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Certificate(pem, _pem(builder.sign(self._key, hashes.SHA256())))


def _x509_name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, valid_for: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=2))
        .not_valid_after(now + valid_for)
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


class SecretVolume:
    """A folder with tls.crt, tls.key and ca.crt as Kubernetes mounts a secret.

    The files are links into a version's folder, and one rename of the link `..data` replaces all three at once.
    """

    def __init__(self, folder: Path, certificate: Certificate, authority: bytes) -> None:
        self.folder = folder
        self._num_versions = 0
        folder.mkdir(parents=True)
        self.write(certificate, authority)
        for path in (self.certificate, self.key, self.authority):
            path.symlink_to(Path("..data") / path.name)

    @property
    def certificate(self) -> Path:
        return self.folder / "tls.crt"

    @property
    def key(self) -> Path:
        return self.folder / "tls.key"

    @property
    def authority(self) -> Path:
        return self.folder / "ca.crt"

    def paths(self, setting: str = "redis_tls_dir") -> TlsPaths:
        """Paths of all three files, for a client whose setting `setting` is the folder."""
        return TlsPaths.in_folder(setting, self.folder, has_pair=True, has_authorities=True)

    def write(self, certificate: Certificate, authority: bytes) -> None:
        """Replace all three files at once."""
        self._num_versions += 1
        version = self.folder / f"..{self._num_versions}"
        version.mkdir()
        (version / "tls.crt").write_bytes(certificate.chain)
        (version / "tls.key").write_bytes(certificate.key)
        (version / "ca.crt").write_bytes(authority)
        link = self.folder / "..data_tmp"
        link.symlink_to(version.name)
        link.rename(self.folder / "..data")
