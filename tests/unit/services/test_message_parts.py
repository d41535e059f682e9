"""Messages that would take long to parse are found out without parsing them, and all others go through."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from specdec.wire.errors import Internal
from specdec.wire.parsing.parts import MOST_PARTS, TooManyParts, check_parts, find_invalid_utf8
from specdec.wire.parsing.reading import parsed, parsing
from tests.support.cost import lines_run

MOST_LINES = 40 * MOST_PARTS
"""Some hundredths of a second; parsing such messages took up to 180 s with what followed."""
LARGE = 4_000_000
TYPES = (api.GenerateRequest, api.TokenizeRequest, api.DetokenizeRequest, draft_pb2.DraftResponse)


def varint(number: int) -> bytes:
    encoded = b""
    while number >= 128:
        encoded += bytes([number % 128 + 128])
        number //= 128
    return encoded + bytes([number])


def inside(tag: int, payload: bytes) -> bytes:
    """A field with a length."""
    return bytes([tag << 3 | 2]) + varint(len(payload)) + payload


SAMPLING = {field.name: field.number for field in api.SamplingParams.DESCRIPTOR.fields}
FLOODS = {
    "empty messages in a list": (inside(5, inside(1, b"") * LARGE), "messages.messages"),
    "an empty list of messages, again and again": (inside(5, b"") * LARGE, "messages"),
    "strings": (inside(6, inside(SAMPLING["stop"], b"") * LARGE), "sampling.stop"),
    "entries of a map": (inside(6, inside(SAMPLING["logit_bias"], b"") * LARGE), "sampling.logit_bias"),
    "choices to resume": (inside(9, inside(2, b"") * LARGE), "resume.choices"),
    "packed numbers": (inside(4, inside(1, b"\5" * 3 * LARGE)), "prompt_token_ids.token_ids"),
    "numbers one by one": (inside(4, b"\x08\5" * LARGE), "prompt_token_ids"),
    "fields that there are not": (b"\xf8\x0f\0" * LARGE, "request"),
    "groups in groups": (b"\xfb\x0f" * LARGE, "request"),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_of_parts_is_refused_by_name_in_no_time(name: str) -> None:
    data, field = FLOODS[name]

    def check() -> None:
        with pytest.raises(TooManyParts) as caught:
            check_parts(api.GenerateRequest.DESCRIPTOR, data)
        assert caught.value.field == field

    assert lines_run(check) < MOST_LINES


def test_what_is_large_and_has_few_parts_goes_through() -> None:
    messages = [api.ChatMessage(role="user", content="x" * 300)] * 8000
    for request in (
        api.GenerateRequest(prompt="x" * 16_000_000),
        api.GenerateRequest(prompt_token_ids=pb_ids(1_000_000)),
        api.GenerateRequest(messages=api.ChatMessages(messages=messages)),
        api.DetokenizeRequest(token_ids=[2**31] * 500_000),
    ):
        check_parts(request.DESCRIPTOR, request.SerializeToString())


def pb_ids(num: int) -> api.TokenIds:
    return api.TokenIds(token_ids=[150_000] * num)


def test_a_string_that_is_not_utf8_is_found_in_no_time_behind_as_many_parts_as_may_be() -> None:
    data = inside(5, inside(1, b"") * (MOST_PARTS - 10) + inside(1, inside(2, b"\xff")))
    check_parts(api.GenerateRequest.DESCRIPTOR, data)

    def find() -> None:
        found = find_invalid_utf8(api.GenerateRequest.DESCRIPTOR, data)
        assert found == f"messages.messages[{MOST_PARTS - 10}].content"

    assert lines_run(find) < MOST_LINES


pieces = st.lists(
    st.one_of(
        st.binary(max_size=12),
        st.integers(0, 2**35).map(varint),
        st.tuples(st.integers(1, 15), st.binary(max_size=20)).map(lambda pair: inside(*pair)),
    ),
    max_size=12,
).map(b"".join)


@given(data=pieces, kind=st.sampled_from(TYPES), most=st.integers(0, 6))
def test_no_bytes_make_it_raise_anything_else(data: bytes, kind: type[Message], most: int) -> None:
    with suppress(TooManyParts):
        check_parts(kind.DESCRIPTOR, data, most)
    check_parts(kind.DESCRIPTOR, data, len(data))
    find_invalid_utf8(kind.DESCRIPTOR, data)


@given(data=pieces, kind=st.sampled_from(TYPES))
def test_a_field_is_found_only_in_what_does_not_parse(data: bytes, kind: type[Message]) -> None:
    if find_invalid_utf8(kind.DESCRIPTOR, data) is not None:
        with pytest.raises(DecodeError):
            kind.FromString(data)


@given(
    stops=st.lists(st.text(max_size=5), max_size=20),
    ids=st.lists(st.integers(0, 2**32 - 1), max_size=300),
    biases=st.dictionaries(st.integers(0, 2**32 - 1), st.floats(width=32), max_size=20),
)
def test_parts_are_counted_as_they_are(stops: list[str], ids: list[int], biases: dict[int, float]) -> None:
    request = api.GenerateRequest(prompt_token_ids=api.TokenIds(token_ids=ids))
    request.sampling.stop.extend(stops)
    request.sampling.logit_bias.update(biases)
    num_packed_bytes = sum(len(varint(token_id)) for token_id in ids)
    num = 2 + len(stops) + 3 * len(biases) + bool(ids) + num_packed_bytes // 128
    data = request.SerializeToString()
    check_parts(request.DESCRIPTOR, data, num)
    if len(data) > num - 1:
        with pytest.raises(TooManyParts):
            check_parts(request.DESCRIPTOR, data, num - 1)


def test_a_proposal_in_a_drafts_frame_is_bytes_and_not_looked_into() -> None:
    proposal = pb.Proposal(token_ids=range(60)).SerializeToString()
    frame = draft_pb2.DraftResponse(results=[draft_pb2.DraftResult(session_id="a", proposal=proposal)] * 256)
    check_parts(frame.DESCRIPTOR, frame.SerializeToString(), 4 * 256)


class Told:
    """A channel with one answer to all calls."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def __getattr__(self, _arity: str) -> Any:
        def multi_callable(_path: str, *, response_deserializer: Any, **_codec: Any) -> Any:
            return lambda *_arguments: response_deserializer(self._answer)

        return multi_callable


@pytest.mark.parametrize(
    ("method", "part"), [("GetReplicaInfo", b"\x0a\0"), ("Verify", b"\x12\0"), ("Draft", b"\x12\0")]
)
def test_no_answer_of_a_replica_is_parsed_that_has_too_many_parts(method: str, part: bytes) -> None:
    channel: Any = parsing(Told(part * LARGE), counts_parts=True)  # type: ignore[type-var]
    stub: Any = (draft_pb2_grpc.DraftServiceStub if method == "Draft" else target_pb2_grpc.TargetServiceStub)(channel)
    with pytest.raises(Internal, match="more than") as caught:
        parsed(getattr(stub, method)(None))
    assert caught.value.reason == "MALFORMED_ANSWER"


def test_log_probabilities_of_a_whole_batch_are_an_answer() -> None:
    position = pb.PositionLogprobs(top=[pb.TokenLogprob(token_id=70_000, logprob=-1.5)] * 20)
    verdict = pb.Verdict(token_ids=[70_000] * 65, logprobs=[position] * 65)
    frame = target_pb2.VerifyResponse(results=[target_pb2.TargetResult(session_id="a", verdict=verdict)] * 128)
    stub = target_pb2_grpc.TargetServiceStub(parsing(Told(frame.SerializeToString()), counts_parts=True))  # type: ignore[type-var]
    assert parsed(stub.Verify(None)) == frame


def test_what_a_draft_has_for_thousands_of_sessions_is_a_frame() -> None:
    results = [draft_pb2.DraftResult(session_id=f"c/{n}/0", epoch=1, proposal=b"x" * 30) for n in range(4000)]
    frame = draft_pb2.DraftResponse(results=results)
    check_parts(frame.DESCRIPTOR, frame.SerializeToString())
