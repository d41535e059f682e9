"""Keys, certificates and authorities in PEM files that are renewed under a running process.

Secrets are exchanged in place (cert-manager swaps a symbolic link), so whoever begins connections asks for the files
as they are then. Connections that are open keep what they have; new ones get the new certificate.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

# A renewal may come between two reads; then key and certificate are read again.
_MAX_READS = 3
_log = structlog.get_logger(__name__)

_Content = tuple[bytes | None, bytes | None, bytes | None]


class TlsFilesBroken(Exception):
    """A TLS file cannot be used; the message names the setting and says why."""


@dataclass(frozen=True, slots=True)
class TlsFile:
    """A file, and the name of the setting that names it."""

    setting: str
    path: Path

    @classmethod
    def of(cls, setting: str, path: Path | None) -> TlsFile | None:
        """The file of a setting that may be open."""
        return None if path is None else cls(setting, path)

    def read(self) -> bytes:
        """What is in it now. Raises TlsFilesBroken."""
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise TlsFilesBroken(f"{self.setting}: {error}") from error


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """One consistent state of the files: PEM bytes, checked; None for a file that is not named."""

    key: bytes | None = field(repr=False)
    chain: bytes | None
    authorities: bytes | None
    ssl_context: ssl.SSLContext = field(compare=False)
    """The same for Python's own servers and clients."""


class TlsFiles:
    """A certificate, its key and authorities, always as they are on disk. Safe for any thread.

    Files that change to something unusable are logged once and the last good state is kept.
    """

    def __init__(
        self,
        make_context: Callable[[bytes | None], ssl.SSLContext],
        *,
        certificate: TlsFile | None,
        key: TlsFile | None,
        authorities: TlsFile | None,
    ) -> None:
        """Read the files. Raises TlsFilesBroken.

        Args:
            make_context: for one side, from the authorities' PEM; `server_context` or `client_context`.
            certificate: the chain; there if, and only if, its key is.
            key: of the certificate.
            authorities: whose certificates the other side may show.
        """
        self._make_context = make_context
        self._certificate = certificate
        self._key = key
        self._authorities = authorities
        self._lock = threading.Lock()
        self.refused = ""
        """Why the files on disk are not in use, as of the last look at them; empty when they are."""
        self.num_refusals = 0
        """How often files have changed to something unusable."""
        self._current = self._load()

    @property
    def names_authorities(self) -> bool:
        """Whether authorities are named: a server then demands certificates of its clients."""
        return self._authorities is not None

    def current(self) -> TlsMaterial:
        """The newest good state; the same object until it changes. Never raises. Reads three small files."""
        with self._lock:
            try:
                if self._read() != (self._current.key, self._current.chain, self._current.authorities):
                    self._current = self._load()
                    files = filter(None, (self._certificate, self._key, self._authorities))
                    _log.info("tls_files_renewed", **{file.setting: str(file.path) for file in files})
                self.refused = ""
            except TlsFilesBroken as error:
                if str(error) != self.refused:
                    self.num_refusals += 1
                    _log.error("tls_files_refused", reason=str(error), kept="the last good certificate")
                self.refused = str(error)
            return self._current

    def _read(self) -> _Content:
        key, chain, authorities = (
            None if file is None else file.read() for file in (self._key, self._certificate, self._authorities)
        )
        return key, chain, authorities

    def _load(self) -> TlsMaterial:
        """What was read and checked while nothing changed in between."""
        for _ in range(_MAX_READS):
            content = self._read()
            try:
                context = self._check(content[2])
            except TlsFilesBroken:
                if self._read() == content:
                    raise
                continue
            if self._read() == content:
                return TlsMaterial(*content, context)
        raise TlsFilesBroken("the TLS files change while they are read")

    def _check(self, authorities: bytes | None) -> ssl.SSLContext:
        try:
            context = self._make_context(authorities)
        except (OSError, ValueError) as error:
            setting = "the system's authorities" if self._authorities is None else self._authorities.setting
            raise TlsFilesBroken(f"{setting}: {_why(error)}") from error
        if self._certificate is not None and self._key is not None:
            try:
                # Without a password OpenSSL would ask the terminal for that of an encrypted key.
                context.load_cert_chain(self._certificate.path, self._key.path, password="")
            except (OSError, ValueError) as error:
                message = f"{self._certificate.setting}, {self._key.setting}: {_why(error)}"
                raise TlsFilesBroken(message) from error
        return context


def server_context(authorities: bytes | None) -> ssl.SSLContext:
    """A server that demands certificates of these authorities, if there are any. Raises OSError or ValueError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if authorities is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=authorities.decode("ascii"))
    return context


def client_context(authorities: bytes | None) -> ssl.SSLContext:
    """A client that trusts these authorities and no others; without any, the system's. Raises OSError or ValueError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if authorities is None:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    else:
        context.load_verify_locations(cadata=authorities.decode("ascii"))
    return context


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return "the key does not belong to the certificate"
    if isinstance(error, ssl.SSLError):
        said = (error.reason or str(error)).partition(" (_ssl.c")[0]
        return f"not usable PEM ({said.replace('_', ' ').lower()})"
    return "not usable PEM (not ASCII)" if isinstance(error, UnicodeDecodeError) else str(error)
