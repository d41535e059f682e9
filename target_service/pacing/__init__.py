"""The policies, applied to live sessions: when the target steps, and which nodes a step verifies."""
