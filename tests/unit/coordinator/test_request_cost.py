"""What a request over gRPC may cost, whichever of its fields grows to the largest message."""

from __future__ import annotations

import tracemalloc

import pytest
from google.protobuf.message import Message

from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import open_inference_pb2 as oip
from specdec.v1 import vllm_engine_pb2 as vllm
from specdec.wire.errors import InvalidRequest, NotFound, SpecdecError
from specdec.wire.parsing.parts import MOST_PARTS
from tests.support.cost import lines_run
from tests.support.costly.methods import check, messages

MESSAGE_BYTES = 16 * 2**20
MOST_LINES = 32 * MOST_PARTS
"""Thirty lines of the walk look at a part whose number takes two bytes."""
MOST_BYTES_PER_BYTE = 4
MOST_BYTES_PER_LEGAL_BYTE = 20
"""A token id in a list takes forty bytes, its origin eight; on the wire it takes three."""
ANY_BYTES = 6 * 2**20
"""What any request takes; 256 KiB of JSON as values."""
OWN: tuple[type[Message], ...] = (api.GenerateRequest, api.TokenizeRequest, api.DetokenizeRequest)
REQUESTS: tuple[type[Message], ...] = (*OWN, oip.ModelInferRequest, vllm.VllmGenerateRequest)


def outcome(kind: type[Message], data: bytes) -> SpecdecError | None:
    try:
        for _ in check(kind, data):
            pass
    except SpecdecError as error:
        return error
    return None


@pytest.mark.parametrize("kind", REQUESTS)
def test_the_largest_message_costs_bounded_work_and_few_times_its_bytes(kind: type[Message]) -> None:
    for name, data in messages(kind, MESSAGE_BYTES):
        tracemalloc.start()
        error = outcome(kind, data)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        most = MOST_BYTES_PER_LEGAL_BYTE if error is None else MOST_BYTES_PER_BYTE
        assert peak < most * len(data) + ANY_BYTES, name
        assert lines_run(lambda data=data: outcome(kind, data)) < MOST_LINES, name
        if error is not None:
            assert isinstance(error, InvalidRequest | NotFound), name
            assert len(error.message) < 2200, name
