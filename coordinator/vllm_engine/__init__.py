"""vLLM's gRPC service: requests of routers become Generate calls, chunks become token ids. See `servicer.py`."""
