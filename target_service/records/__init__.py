"""What is told of a session and of a step: metrics, spans, progress."""
