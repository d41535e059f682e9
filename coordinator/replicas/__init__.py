"""Replicas: discovery, compatibility, load, and the choice of one for a request."""
