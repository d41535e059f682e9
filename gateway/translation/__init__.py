"""From OpenAI's requests to gRPC's, and from what comes back to OpenAI's objects: pure functions."""
