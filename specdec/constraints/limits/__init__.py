"""Checks of a constraint's form, the same at coordinators and replicas. Needs the standard library only."""

from specdec.constraints.limits.faults import MAX_CHOICES, MAX_CONSTRAINT_BYTES, fault_of

__all__ = ["MAX_CHOICES", "MAX_CONSTRAINT_BYTES", "fault_of"]
