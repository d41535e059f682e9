"""Admission: from the session that an owner opens to a sequence in the engine."""
