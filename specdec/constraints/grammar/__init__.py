"""What a constraint allows next: compiled apart from the engine's thread, followed token by token on it.

Needs llguidance and numpy, no torch: engine processes of targets and drafts use it.
"""
