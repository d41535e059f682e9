"""From what an owner opens to a sequence in the engine."""
