"""Sources of proposals: draft services, the target's own draft, and its drafters."""
