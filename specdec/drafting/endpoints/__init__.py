"""A draft behind an OpenAI-compatible endpoint: text is streamed ahead, and proposed as the target's tokens."""
