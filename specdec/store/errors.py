"""Errors of a store."""

from __future__ import annotations


class StoreError(Exception):
    """Base of a store's errors."""


class StoreUnavailable(StoreError):
    """The store is gone, too slow, or refuses to work. The operation may have taken effect or not."""


class RequestHeld(StoreError):
    """Another owner holds a live lease on the request."""

    def __init__(self, owner_id: str) -> None:
        super().__init__(f"the request is held by {owner_id}")
        self.owner_id = owner_id


class TooManyConcurrent(StoreError):
    """The tenant has reached its limit of running requests."""

    def __init__(self, num_running: int) -> None:
        super().__init__(f"{num_running} requests of this tenant are running")
        self.num_running = num_running


class LimitExceeded(StoreError, ValueError):
    """An argument exceeds a bound of StoreLimits. Nothing was written."""


class StoreUrlError(StoreError, ValueError):
    """The setting `redis_url`, or one that goes with it, is wrong. Never holds a password."""
