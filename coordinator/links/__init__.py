"""The streams to target and draft replicas: one per replica, for all sessions."""
