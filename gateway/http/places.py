"""Places of running requests, and who takes them: a client has a share, so that its slow requests refuse no other."""

from __future__ import annotations

import hashlib

from starlette.datastructures import Headers
from starlette.types import Scope

from specdec.gateway.api.errors import ApiError

_LEAST_PLACES = 8
"""Places of a client, at least."""
_KEYS = ("authorization", "x-api-key", "specdec-tenant")


def client_of(scope: Scope, headers: Headers) -> str:
    """Name of a request's client: its key and tenant if it sends one, else its address. Keys are not checked here."""
    told = "\0".join(headers.get(name, "") for name in _KEYS)
    if told.strip("\0"):
        return hashlib.blake2b(told.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    return address_of(scope)


def address_of(scope: Scope) -> str:
    """The peer's address; it may be a proxy's."""
    return str((scope.get("client") or ("",))[0])


class Places:
    """Counts running requests, by client and by address."""

    def __init__(self, most: int) -> None:
        """`most`: requests at once. A key has a quarter, an address half, at least `_LEAST_PLACES`."""
        self._most = most
        self._most_of_key = max(_LEAST_PLACES, most // 4)
        self._most_of_address = max(_LEAST_PLACES, most // 2)
        self._taken: dict[str, int] = {}
        self._num_taken = 0

    def refusal(self, client: str, address: str) -> ApiError | None:
        """The answer to a request for which there is no place; None: `take` it."""
        if self._num_taken >= self._most:
            return _refused(f"{self._most} requests are running (max_concurrent_requests)")
        for who in {client, address}:
            most = self._most_of_address if who == address else self._most_of_key
            if self._taken.get(who, 0) >= most:
                return _refused(f"{most} requests of this client are running (a share of max_concurrent_requests)")
        return None

    def take(self, client: str, address: str) -> None:
        """Take a place."""
        self._num_taken += 1
        for who in {client, address}:
            self._taken[who] = self._taken.get(who, 0) + 1

    def leave(self, client: str, address: str) -> None:
        """Free a place."""
        self._num_taken -= 1
        for who in {client, address}:
            self._taken[who] -= 1
            if not self._taken[who]:
                del self._taken[who]


def _refused(message: str) -> ApiError:
    return ApiError(429, message, type="requests", code="rate_limit_exceeded", retry_after_s=0.0)
