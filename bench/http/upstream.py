"""A coordinator that only streams: one token of every request per interval, each with the time at which it was sent.

python -m bench.http.upstream PORT INTERVAL_MS
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import coordinator_pb2_grpc


class PacedCoordinator(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Streams tokens whose text is the monotonic time of sending, in ns, and a bar."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s

    async def Generate(self, request: api.GenerateRequest, context: Any) -> AsyncIterator[api.GenerateResponse]:  # noqa: N802
        """Stream the first token at once and the others at their due times; late ones follow without a wait."""
        identity = pb.ModelIdentity(name="paced", numerics_id="n", tokenizer_digest="t")
        yield api.GenerateResponse(started=api.GenerateStarted(request_id=request.request_id, model=identity))
        due_s = time.monotonic()
        num_tokens = request.sampling.max_tokens
        for number in range(num_tokens):
            if (wait_s := due_s - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            due_s += self._interval_s
            text = f"{time.monotonic_ns()}|"
            token = api.OutputToken(id=number, text=text, origin=pb.ORIGIN_DECODE)
            yield api.GenerateResponse(delta=api.ChoiceDelta(text=text, tokens=[token]))
        end = api.ChoiceFinished(reason=pb.FINISH_REASON_LENGTH)
        yield api.GenerateResponse(choice_finished=end)
        usage = api.Usage(completion_tokens=num_tokens)
        yield api.GenerateResponse(finished=api.GenerateFinished(usage=usage))


async def _serve(port: int, interval_s: float) -> None:
    server = grpc.aio.server()
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(PacedCoordinator(interval_s), server)  # type: ignore[abstract]
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), float(sys.argv[2]) / 1000))
