"""`specdec generate`: a completion, streamed to the terminal."""
