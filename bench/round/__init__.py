"""One round of speculation taken apart: from a verdict to the proposal that answers it."""
