"""OpenAI-compatible endpoints that services call: how they are set up, and calls that trust nothing that comes back."""
