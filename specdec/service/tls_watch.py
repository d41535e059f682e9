"""Keep metrics of TLS files current, and tell of expired certificates: only new connections read the files."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from specdec.telemetry.tls_metrics import TlsMetrics
from specdec.wire.tls_files import TlsFiles

INTERVAL_S = 5.0
"""Seconds between two looks at the files."""
TlsUses = Callable[[], Mapping[str, TlsFiles | None]]
"""The files by use; None without TLS, or before it is set up."""
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Validity:
    """Validity of a certificate, in Unix time."""

    not_before_s: float
    not_after_s: float

    @property
    def lifetime_s(self) -> float:
        """Total time of validity."""
        return self.not_after_s - self.not_before_s


def validity_of(chain: bytes) -> Validity:
    """Validity of the certificate in a PEM chain that expires first. Raises ValueError."""
    from cryptography import x509  # takes 10 MB of memory, only with TLS

    return min(
        (
            Validity(one.not_valid_before_utc.timestamp(), one.not_valid_after_utc.timestamp())
            for one in x509.load_pem_x509_certificates(chain)
        ),
        key=lambda validity: validity.not_after_s,
    )


class TlsWatch:
    """Checks all TLS files of a process every INTERVAL_S, so that renewals and refusals show without a connection."""

    def __init__(self, metrics: TlsMetrics, uses: TlsUses) -> None:
        self._metrics = metrics
        self._uses = uses
        self._shown: dict[str, bytes | None] = {}
        self._expires_s: dict[str, float] = {}
        """Expiry by use, in Unix time, until it has been told."""
        self._num_refusals: dict[str, int] = {}

    async def run(self) -> None:
        """Check until cancelled, in a thread: files may be on a network."""
        while True:
            for use, files in self._uses().items():
                if files is not None:
                    await asyncio.to_thread(self.look, use, files)
            await asyncio.sleep(INTERVAL_S)

    def look(self, use: str, files: TlsFiles) -> None:
        """Load renewed files, and update the metrics."""
        chain = files.current().chain
        counter = self._metrics.failures.labels(use)
        counter.inc(files.num_refusals - self._num_refusals.get(use, 0))
        self._num_refusals[use] = files.num_refusals
        self._metrics.refused.labels(use).set(bool(files.refused))
        if chain is not None and self._shown.get(use) != chain:
            self._show(use, chain)
        if self._expires_s.get(use, math.inf) <= time.time():
            del self._expires_s[use]
            _log.error("certificate_expired", use=use, effect="no new connection until the files are renewed")

    def _show(self, use: str, chain: bytes) -> None:
        self._shown[use] = chain
        self._expires_s.pop(use, None)
        try:
            validity = validity_of(chain)
        except ValueError as error:  # OpenSSL, which uses the file, is less strict
            _log.warning("certificate_not_read", use=use, error=str(error))
            return
        self._metrics.expiry.labels(use).set(validity.not_after_s)
        self._metrics.lifetime.labels(use).set(validity.lifetime_s)
        self._expires_s[use] = validity.not_after_s
