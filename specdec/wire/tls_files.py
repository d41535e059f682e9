"""Keys, certificates and authorities in PEM files that are renewed under a running process.

Secrets are exchanged in place (Kubernetes swaps the link `..data`), so the files are read before each new connection.
Open connections keep their certificate; new ones get the new certificate.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import structlog

_MAX_READS = 3
"""Reads of all files until two agree: a renewal may come between two files."""
FOLDER_FILES = ("tls.crt", "tls.key", "ca.crt")
"""Certificate chain, its private key and authorities, as a Kubernetes secret of type kubernetes.io/tls names them."""
_log = structlog.get_logger(__name__)

_Content = tuple[bytes | None, bytes | None, bytes | None]


class TlsFilesBroken(Exception):
    """A TLS file cannot be used; the message names the setting and the reason."""


@dataclass(frozen=True, slots=True)
class TlsFile:
    """A file, and the setting that names it or its folder."""

    setting: str
    path: Path
    in_folder: bool = False

    @classmethod
    def of(cls, setting: str, path: Path | None) -> TlsFile | None:
        """The file of a setting that may be null."""
        return None if path is None else cls(setting, path)

    def read(self) -> bytes:
        """The file's content now. Raises TlsFilesBroken."""
        try:
            return self.path.read_bytes()
        except OSError as error:
            reason = error.strerror if self.in_folder else error
            raise TlsFilesBroken(f"{_origin(self)}: {reason}") from error


@dataclass(frozen=True, slots=True)
class TlsPaths:
    """The files of one side of a connection; None for a file that the settings leave out."""

    certificate: TlsFile | None = None
    """The chain; given if, and only if, its key is."""
    key: TlsFile | None = None
    authorities: TlsFile | None = None
    """The other side's certificate must come from one of these."""

    @classmethod
    def in_folder(cls, setting: str, folder: Path, *, has_pair: bool, has_authorities: bool) -> TlsPaths:
        """The files of a folder in which Kubernetes mounts a secret."""
        certificate, key, authorities = (TlsFile(setting, folder / name, in_folder=True) for name in FOLDER_FILES)
        return cls(
            certificate if has_pair else None,
            key if has_pair else None,
            authorities if has_authorities else None,
        )

    def __iter__(self) -> Iterator[TlsFile]:
        return (file for file in (self.certificate, self.key, self.authorities) if file is not None)


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """One consistent state of the files: PEM bytes, checked; None for a file that is left out."""

    key: bytes | None = field(repr=False)
    chain: bytes | None
    authorities: bytes | None
    ssl_context: ssl.SSLContext = field(compare=False)
    """The files' content for Python's own servers and clients."""


class TlsFiles:
    """A certificate, its key and authorities as they are on disk. Safe for any thread.

    Where changed files cannot be used, the fault is logged once and the last good state is kept.
    """

    def __init__(
        self,
        make_context: Callable[[bytes | None], ssl.SSLContext],
        paths: TlsPaths,
    ) -> None:
        """Read the files. `make_context` is `server_context` or `client_context`. Raises TlsFilesBroken."""
        self._make_context = make_context
        self._paths = paths
        self._lock = threading.Lock()
        self.refused = ""
        """The reason why the files on disk are not in use, as of the last read; empty when they are."""
        self.num_refusals = 0
        """Number of changes to files that cannot be used."""
        self._current = self._load()

    @property
    def names_authorities(self) -> bool:
        """Whether there is a file of authorities: a server then demands certificates of its clients."""
        return self._paths.authorities is not None

    def current(self) -> TlsMaterial:
        """The newest good state, the same object until it changes. Reads three small files. Never raises."""
        with self._lock:
            try:
                if self._read() != (self._current.key, self._current.chain, self._current.authorities):
                    self._current = self._load()
                    _log.info("tls_files_renewed", files=[str(file.path) for file in self._paths])
                self.refused = ""
            except TlsFilesBroken as error:
                if str(error) != self.refused:
                    self.num_refusals += 1
                    _log.error("tls_files_refused", reason=str(error), kept="the last good certificate")
                self.refused = str(error)
            return self._current

    def _read(self) -> _Content:
        key, chain, authorities = (
            None if file is None else file.read()
            for file in (self._paths.key, self._paths.certificate, self._paths.authorities)
        )
        return key, chain, authorities

    def _load(self) -> TlsMaterial:
        """The files, checked, which did not change between two reads."""
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
            file = self._paths.authorities
            origin = "the system's authorities" if file is None else _origin(file)
            raise TlsFilesBroken(f"{origin}: {_why(error)}") from error
        certificate, key = self._paths.certificate, self._paths.key
        if certificate is not None and key is not None:
            try:
                # Without one OpenSSL asks the terminal for the password of an encrypted key.
                context.load_cert_chain(certificate.path, key.path, password="")
            except (OSError, ValueError) as error:
                raise TlsFilesBroken(f"{_origin(certificate, key)}: {_why(error)}") from error
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


def _origin(*files: TlsFile) -> str:
    """The setting, and of a folder the files' names: `tls_dir: tls.crt, tls.key in /etc/specdec/tls`."""
    if files[0].in_folder:
        return f"{files[0].setting}: {', '.join(file.path.name for file in files)} in {files[0].path.parent}"
    return ", ".join(file.setting for file in files)


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return "the key does not belong to the certificate"
    if isinstance(error, ssl.SSLError):
        said = (error.reason or str(error)).partition(" (_ssl.c")[0]
        return f"not usable PEM ({said.replace('_', ' ').lower()})"
    return "not usable PEM (not ASCII)" if isinstance(error, UnicodeDecodeError) else str(error)
