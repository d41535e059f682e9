"""The journal of streamed tokens, from which another coordinator can resume a request."""

from specdec.coordinator.journal.journal import Journal
from specdec.coordinator.journal.upkeep import JournalSettings

__all__ = ["Journal", "JournalSettings"]
