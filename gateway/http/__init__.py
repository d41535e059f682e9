"""HTTP itself: connections, bodies, streams of events, and what every request goes through."""
