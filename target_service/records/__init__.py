"""Reports about sessions and steps: metrics, spans, progress."""
