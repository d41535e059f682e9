"""Numbers at the ends of their fields' ranges: refused with a typed error, or taken; nobody else notices."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.target_service.verdicts import end_position
from specdec.v1 import common_pb2 as pb
from specdec.wire.message_sizes import UINT32_MAX, microseconds, uint32
from tests.support.engine.local_pair import LocalPair
from tests.support.engine.worker_client import WorkerClient

RANGES = {
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
}
MESSAGES: dict[str, type[Message]] = {
    "proposal": pb.Proposal,
    "commit": pb.Commit,
    "credit": pb.Credit,
    "open": pb.OpenSession,
}
PROMPT = list(range(20, 40))


def integer_fields(message: Message, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of all integer fields of a message, those of its parts too; maps are left out."""
    found: list[tuple[str, ...]] = []
    for field in message.DESCRIPTOR.fields:
        name = (*path, field.name)
        if field.cpp_type in RANGES:
            found.append(name)
        elif field.message_type is not None and not field.is_repeated:
            found += integer_fields(getattr(message, field.name), name)
    return found


def put(message: Any, path: tuple[str, ...], value: int) -> None:
    for name in path[:-1]:
        message = getattr(message, name)
    field = message.DESCRIPTOR.fields_by_name[path[-1]]
    if field.is_repeated:
        del getattr(message, path[-1])[:]
        getattr(message, path[-1]).extend([value] * 3)
    else:
        setattr(message, path[-1], value)


def sound(kind: str) -> Any:
    """A message that is taken."""
    match kind:
        case "open":
            sampling = pb.TokenSampling(
                temperature=1.0, top_p=1.0, repetition_penalty=1.0, max_tokens=4, ignore_eos=True
            )
            return pb.OpenSession(
                token_ids=PROMPT, num_prompt_tokens=len(PROMPT), sampling=sampling, speculate=True, credit_position=99
            )
        case "proposal":
            return pb.Proposal(start_position=len(PROMPT), token_ids=[1, 2], draft_us=10, path_length=2)
        case "commit":
            return pb.Commit(start_position=len(PROMPT), token_ids=[1])
        case _:
            return pb.Credit(position=len(PROMPT) + 10)


@st.composite
def extreme(draw: st.DrawFn, kind: str) -> Any:
    """A sound message with some of its integers at, or beside, the ends of their ranges."""
    message = sound(kind)
    for path in draw(st.lists(st.sampled_from(integer_fields(message)), min_size=1, max_size=3, unique=True)):
        part = message
        for name in path[:-1]:
            part = getattr(part, name)
        low, high = RANGES[part.DESCRIPTOR.fields_by_name[path[-1]].cpp_type]
        put(message, path, draw(st.sampled_from([low, low + 1, high - 1, high])))
    return message


@pytest.fixture(scope="module")
def pair() -> LocalPair:
    return LocalPair()


def session_goes_on(client: WorkerClient, role: str) -> None:
    """Another session, opened before, is served as if nothing had been."""
    client.turn(6)
    assert client.session("innocent") is not None or client.take("verdict", "innocent")
    assert not client.take("error", "innocent")
    assert not client.aborts


@pytest.mark.parametrize(
    ("role", "kind"),
    [("target", "open"), ("target", "proposal"), ("target", "credit"), ("draft", "open"), ("draft", "commit")],
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_extreme_integers_cost_at_most_the_session_that_they_are_for(
    pair: LocalPair, role: str, kind: str, data: st.DataObject
) -> None:
    client = WorkerClient(pair, role)
    client.attach()
    client.entry("innocent", open=sound("open"))
    if kind != "open":
        client.entry("s", open=sound("open"))
    client.turn(1)
    message = data.draw(extreme(kind))
    client.entry("s", **{kind: message.SerializeToString() if kind == "proposal" else message})
    session_goes_on(client, role)
    client.end_all()
    client.check_nothing_held()


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("value", [0, 1, 2**32 - 2, 2**32 - 1])
def test_an_attach_may_name_any_length_and_epoch(pair: LocalPair, role: str, value: int) -> None:
    client = WorkerClient(pair, role)
    client.attach()
    client.entry("innocent", open=sound("open"))
    client.turn(1)
    client.attach(stream_id=2, lease=2**64 - 1, held={"innocent": (1, value), "unknown": (2**64 - 1, value)})
    client.turn(3)
    client.end_all()
    client.check_nothing_held()


def test_a_draft_that_lies_about_its_time_costs_the_target_nothing(pair: LocalPair) -> None:
    client = WorkerClient(pair, "target")
    client.attach()
    client.entry("s", open=sound("open"))
    client.turn(1)
    position = len(PROMPT)
    verdicts = client.take("verdict")
    position = max(map(end_position, verdicts), default=position)
    lie = pb.Proposal(start_position=position, token_ids=[1, 2, 3, 4], draft_us=UINT32_MAX, path_length=1)
    client.entry("s", proposal=lie.SerializeToString())
    client.turn(6)
    assert client.take("verdict")
    assert not client.take("error")
    assert pair.verifier.steps.pacing.draft_latency.node_s <= 1.0
    client.end_all()


def test_what_a_field_cannot_hold_is_cut() -> None:
    assert [uint32(value) for value in (-1, 0, 5.9, 2**32, float("inf"), float("nan"))] == [
        0, 0, 5, UINT32_MAX, UINT32_MAX, 0,
    ]  # fmt: skip
    assert [microseconds(seconds) for seconds in (0.5, 71 * 60, 72 * 60, 1e12)] == [
        500_000, 4_260_000_000, UINT32_MAX, UINT32_MAX,
    ]  # fmt: skip
