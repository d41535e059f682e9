"""Times of the stages of one round of speculation: from a verdict to the proposal that answers it."""
