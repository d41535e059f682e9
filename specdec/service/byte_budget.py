"""Budgets of bytes, for each client and for all together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from specdec.wire.errors import Overloaded

_RETRY_S = 1.0
"""Seconds that a refused client is told to wait: the time until room is free is unknown, and a retry is cheap."""


class Held:
    """The bytes of one request, which may grow."""

    def __init__(self, budget: ByteBudget, client: str, address: str = "") -> None:
        self._budget = budget
        self._client = client
        self._address = address
        self.num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Hold more bytes. Raises Overloaded if there is no room; the bytes held so far stay."""
        self._budget.take(self._client, self._address, num_bytes, self.num_bytes)
        self.num_bytes += num_bytes


class ByteBudget:
    """Budgets of bytes, for each client and for all together. An empty budget admits a request of any size.

    An address has half of the whole: whoever names a new client with each request has no more.
    """

    def __init__(self, total_bytes: int, client_bytes: int, on_refused: Callable[[], None] = lambda: None) -> None:
        """Nothing is held yet. `on_refused` is called for each request that is refused."""
        self.num_bytes = 0
        """Bytes held now."""
        self._total_bytes = total_bytes
        self._client_bytes = client_bytes
        self._of_client: dict[str, int] = {}
        self._of_address: dict[str, int] = {}
        self._on_refused = on_refused

    @contextmanager
    def hold(self, client: str, num_bytes: int = 0, *, address: str = "") -> Iterator[Held]:
        """Hold a request's bytes. No bytes are never refused: a request that may grow begins with none. `address`: the
        client's; empty: many clients share it.

        Raises:
            Overloaded: the client's budget, or that of all, has no room (PROMPT_BYTES_EXCEEDED).
        """
        held = Held(self, client, address)
        if num_bytes:
            held.grow(num_bytes)
        try:
            yield held
        finally:
            self.num_bytes -= held.num_bytes
            for of_whom, who in ((self._of_client, client), (self._of_address, address)):
                left = of_whom.get(who, 0) - held.num_bytes  # may be 0 while empty requests are left
                if left:
                    of_whom[who] = left
                else:
                    of_whom.pop(who, None)

    def check(self, client: str, num_bytes: int) -> None:
        """Check that there is room, as `hold` does."""
        with self.hold(client, num_bytes):
            pass

    def take(self, client: str, address: str, num_bytes: int, own_bytes: int) -> None:
        """Take bytes for a request that holds `own_bytes`. Raises Overloaded."""
        of_client = self._of_client.get(client, 0)
        if of_client > own_bytes and of_client + num_bytes > self._client_bytes:
            raise self._refusal("the tenant's requests", of_client, self._client_bytes)
        of_address, most = self._of_address.get(address, 0), self._total_bytes // 2
        if address and of_address > own_bytes and of_address + num_bytes > most:
            raise self._refusal("the address's requests", of_address, most)
        if self.num_bytes > own_bytes and self.num_bytes + num_bytes > self._total_bytes:
            raise self._refusal("all requests", self.num_bytes, self._total_bytes)
        self.num_bytes += num_bytes
        self._of_client[client] = of_client + num_bytes
        self._of_address[address] = of_address + num_bytes

    def _refusal(self, whose: str, held: int, most: int) -> Overloaded:
        self._on_refused()
        return Overloaded(
            f"{held} bytes of {whose} are held, the limit is {most}",
            retry_after_s=_RETRY_S,
            reason="PROMPT_BYTES_EXCEEDED",
        )
