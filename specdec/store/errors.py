"""What a store raises."""

from __future__ import annotations


class StoreError(Exception):
    """Base of all that a store raises."""


class StoreUnavailable(StoreError):
    """The store is gone, too slow, or refuses its work. Nothing is known about whether the operation took effect."""


class RequestHeld(StoreError):
    """Another owner holds a live lease on the request."""

    def __init__(self, owner_id: str) -> None:
        super().__init__(f"the request is held by {owner_id}")
        self.owner_id = owner_id


class TooManyConcurrent(StoreError):
    """The tenant has as many running requests as it may."""

    def __init__(self, num_running: int) -> None:
        super().__init__(f"{num_running} requests of this tenant are running")
        self.num_running = num_running


class LimitExceeded(StoreError, ValueError):
    """An argument is larger than the store takes (see StoreLimits). Nothing was written."""


class StoreUrlError(StoreError, ValueError):
    """The setting `redis_url`, or one that goes with it, is wrong. Never holds a password."""
