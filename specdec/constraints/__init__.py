"""Structured output. `limits/`: which constraints are accepted, checked at coordinators and at replicas. `grammar/`:
which tokens a constraint allows next, at target and draft."""
