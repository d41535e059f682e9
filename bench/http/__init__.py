"""What a gateway adds to gRPC, and how many streams one carries: `python -m bench.http`."""
