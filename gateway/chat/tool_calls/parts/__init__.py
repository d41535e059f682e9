"""What parsers of calls share: their state machine, what they write, and values as JSON."""
