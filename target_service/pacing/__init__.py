"""When the target steps and what a step verifies, applied to live sessions."""
