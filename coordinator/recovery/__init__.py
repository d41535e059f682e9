"""What happens to sessions when a replica fails, leaves or comes back."""

from coordinator.recovery.recovery import Recovery, RecoverySettings

__all__ = ["Recovery", "RecoverySettings"]
