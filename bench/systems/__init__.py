"""The compared systems: deployments of this one, and optional others on the same weights."""
