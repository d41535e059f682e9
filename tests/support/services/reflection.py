"""Lists the gRPC services of a server."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc


def reflect(channel: grpc.aio.Channel) -> Any:
    """Open a reflection stream without a request.

    Tests of refusals write nothing, because grpc.aio ends a call that is refused during a write as INTERNAL.
    """
    make_stub: Any = reflection_pb2_grpc.ServerReflectionStub
    return make_stub(channel).ServerReflectionInfo()


async def list_services(channel: grpc.aio.Channel) -> list[str]:
    """Names of the services."""
    call = reflect(channel)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    return [service.name for service in answer.list_services_response.service]
