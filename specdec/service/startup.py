"""What keeps a service from starting."""

from __future__ import annotations


class StartupFailed(Exception):
    """The service cannot start; the message says why, for people."""
