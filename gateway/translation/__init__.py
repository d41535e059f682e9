"""Translate OpenAI's requests to gRPC, and the chunks to OpenAI's objects. Pure functions."""
