"""A gRPC server that answers only health checks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health, health_pb2_grpc


@contextmanager
def served_health(status: int) -> Iterator[str]:
    """Run a server whose health is `status`; yields its address."""
    servicer = health.HealthServicer()
    servicer.set("", status)
    server = grpc.server(futures.ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()
