"""What was streamed of each request, kept so that another coordinator can take it up."""

from specdec.coordinator.journal.journal import Journal
from specdec.coordinator.journal.upkeep import JournalSettings

__all__ = ["Journal", "JournalSettings"]
