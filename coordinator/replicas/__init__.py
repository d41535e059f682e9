"""Which targets and drafts there are, which fit together, and which of them a request goes to."""
