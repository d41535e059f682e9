"""Budgets for the bytes of requests that a process holds, counted before a request is parsed further."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from specdec.wire.errors import Overloaded

_RETRY_S = 1.0
"""Seconds that a refused client is told to wait: the time until room is free is unknown, and a retry is cheap."""


class PromptBytes:
    """Budgets of bytes, for each tenant and for all together. An empty budget admits a request of any size."""

    def __init__(self, total_bytes: int, tenant_bytes: int, on_refused: Callable[[], None] = lambda: None) -> None:
        """Nothing is held yet. `on_refused` is called for each request that is refused."""
        self.num_bytes = 0
        """Bytes held now."""
        self._total_bytes = total_bytes
        self._tenant_bytes = tenant_bytes
        self._of_tenant: dict[str, int] = {}
        self._on_refused = on_refused

    @contextmanager
    def hold(self, tenant: str, num_bytes: int) -> Iterator[None]:
        """Hold a request's bytes.

        Raises:
            Overloaded: the tenant's budget, or that of all, has no room (PROMPT_BYTES_EXCEEDED).
        """
        held = self._of_tenant.get(tenant, 0)
        if held and held + num_bytes > self._tenant_bytes:
            raise self._refusal("the tenant's requests", held, self._tenant_bytes)
        if self.num_bytes and self.num_bytes + num_bytes > self._total_bytes:
            raise self._refusal("all requests", self.num_bytes, self._total_bytes)
        self.num_bytes += num_bytes
        self._of_tenant[tenant] = held + num_bytes
        try:
            yield
        finally:
            self.num_bytes -= num_bytes
            left = self._of_tenant.get(tenant, 0) - num_bytes  # may be 0 while empty requests are left
            if left:
                self._of_tenant[tenant] = left
            else:
                self._of_tenant.pop(tenant, None)

    def _refusal(self, whose: str, held: int, most: int) -> Overloaded:
        self._on_refused()
        return Overloaded(
            f"{held} bytes of {whose} are held, the limit is {most}",
            retry_after_s=_RETRY_S,
            reason="PROMPT_BYTES_EXCEEDED",
        )
