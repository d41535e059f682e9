"""From a client's request to sessions: checks, tokenization, planning, admission, and resuming."""
