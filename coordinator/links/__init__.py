"""Streams to target and draft replicas: one per replica, shared by all sessions."""
