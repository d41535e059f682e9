"""Replicas, coordinators, networks and failures on a simulated clock."""
