"""How long certificates are good."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Validity:
    """From when until when, in seconds since 1970."""

    not_before_s: float
    not_after_s: float

    @property
    def lifetime_s(self) -> float:
        """How long it is good in all."""
        return self.not_after_s - self.not_before_s


def validity_of(chain: bytes) -> Validity:
    """Return the validity of that certificate of a PEM chain which expires first. Raises ValueError."""
    from cryptography import x509  # 10 MB of memory, for those who use TLS

    return min(
        (
            Validity(one.not_valid_before_utc.timestamp(), one.not_valid_after_utc.timestamp())
            for one in x509.load_pem_x509_certificates(chain)
        ),
        key=lambda validity: validity.not_after_s,
    )
