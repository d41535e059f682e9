"""The latency that a gateway adds to gRPC, and the streams that it carries: `python -m bench.http`."""
