"""Connections between nodes: TCP, with TLS where the service has it."""

from __future__ import annotations

import os
import socket
import ssl

import psutil
from cryptography import x509
from cryptography.x509.oid import NameOID

from specdec.config.nodes import NodeSettings
from specdec.wire.tls_files import TlsFiles, client_context, server_context

GREETING_S = 10.0
"""Seconds for each step until a connection is welcomed."""
_PROBE_S = 5


class PeerUnknown(ConnectionError):
    """The other side's certificate does not have this node's names."""


class NodeConnections:
    """Makes a node's connections. Safe for any thread.

    With TLS both sides show a certificate of the same authority, and each other's must have all the names of one's own:
    nodes of a group share a secret, and other services' certificates do not do.
    """

    def __init__(self, settings: NodeSettings) -> None:
        """Read the TLS files. Raises TlsFilesBroken."""
        paths = settings.server_tls_paths()
        self._server = None if paths is None else TlsFiles(_accepting, paths)
        self._client = None if paths is None else TlsFiles(_calling, paths)

    def call(self, host: str, port: int) -> socket.socket:
        """Connect to the leader, and check it. Raises OSError, whose text says why."""
        raw = socket.create_connection((host.strip("[]"), port), GREETING_S)
        connection = self._secured(raw, self._client, accepts=False)
        try:
            self.check_names(connection)
        except PeerUnknown:
            connection.close()
            raise
        return connection

    def answer(self, raw: socket.socket) -> socket.socket:
        """Complete a connection that was accepted; closes it on errors. Call `check_names`. Raises OSError."""
        raw.settimeout(GREETING_S)
        return self._secured(raw, self._server, accepts=True)

    def check_names(self, connection: socket.socket) -> None:
        """Compare the other side's certificate with this node's. Raises PeerUnknown."""
        if self._server is None or not isinstance(connection, ssl.SSLSocket):
            return
        own = certificate_names(self._server.current().chain or b"")
        lacking = own - certificate_names(connection.getpeercert(True) or b"")
        if lacking:
            raise PeerUnknown(f"tls_dir: the certificate of {_peer(connection)} lacks the name {min(lacking)}")

    def _secured(self, raw: socket.socket, files: TlsFiles | None, *, accepts: bool) -> socket.socket:
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if files is None:
                return raw
            return files.current().ssl_context.wrap_socket(raw, server_side=accepts)
        except BaseException:
            raw.close()
            raise


def outlast(connection: socket.socket, silence_s: float, timeout_s: float | None) -> None:
    """End a welcomed connection when the other side acknowledges nothing for `silence_s`; calls take `timeout_s`."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence_s * 1000))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    connection.settimeout(timeout_s)


def talk_over_interface_of(connection: socket.socket) -> None:
    """Let collectives of this process and its children use the interface of a connection, unless they are told one."""
    address = connection.getsockname()[0].removeprefix("::ffff:").partition("%")[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
            return


def certificate_names(content: bytes) -> frozenset[str]:
    """DNS names of a certificate, PEM or DER, else its common name; in lower case. Raises PeerUnknown without any."""
    try:
        read = x509.load_pem_x509_certificate if content.startswith(b"-----") else x509.load_der_x509_certificate
        certificate = read(content)
    except ValueError as error:
        raise PeerUnknown(f"a certificate cannot be read: {error}") from error
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        names = found.value.get_values_for_type(x509.DNSName)
    except x509.ExtensionNotFound:
        names = []
    names = names or [str(one.value) for one in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if not names:
        raise PeerUnknown("a certificate has neither a DNS name nor a common name")
    return frozenset(name.lower() for name in names)


def _accepting(authorities: bytes | None) -> ssl.SSLContext:
    context = server_context(authorities)
    context.num_tickets = 0  # every record is then a frame's, so that a readable connection has one
    return context


def _calling(authorities: bytes | None) -> ssl.SSLContext:
    context = client_context(authorities)
    context.check_hostname = False  # the names are compared above: pods' certificates do not have their addresses
    return context


def _peer(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return "the other side"
