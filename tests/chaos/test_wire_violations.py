"""Replicas spoken to directly: what breaks the protocol is refused by name, and costs no more than it must."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2

from specdec.commands.up.cluster import Cluster
from specdec.v1 import common_pb2 as pb
from specdec.wire.errors import FailedPrecondition, InvalidRequest
from tests.support.extreme_sampling import bias_cases, cases
from tests.support.services.faults import all_blocks_free
from tests.support.services.peer import MAX_TOKENS, PROMPT, WIRES, Peer, open_session

pytestmark = pytest.mark.integration

OWNERS = itertools.count()


@asynccontextmanager
async def peer_of(cluster: Cluster, role: str) -> AsyncIterator[Peer]:
    """A peer of a replica; its session is given up at the end, and nothing of it is left."""
    owner_id = f"peer-{next(OWNERS)}"
    async with grpc.aio.insecure_channel(cluster.services[role].spec.address) as channel:
        yield Peer(channel, WIRES[role], owner_id)
        await Peer(channel, WIRES[role], owner_id).attach()  # without a session: it is freed
    await all_blocks_free(cluster)


@pytest.fixture
async def target(steady_cluster: Cluster) -> AsyncIterator[Peer]:
    async with peer_of(steady_cluster, "target") as peer:
        yield peer


@pytest.fixture
async def draft(steady_cluster: Cluster) -> AsyncIterator[Peer]:
    async with peer_of(steady_cluster, "draft") as peer:
        yield peer


def named_field(status: status_pb2.Status) -> str:
    request = error_details_pb2.BadRequest()
    assert any(detail.Unpack(request) for detail in status.details), status
    return request.field_violations[0].field


def reason_of(status: status_pb2.Status) -> str:
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in status.details), status
    return info.reason


START = len(PROMPT) + 1
PROPOSALS: dict[str, tuple[Callable[[], bytes], str]] = {
    "a cycle": (
        lambda: pb.Proposal(start_position=START, token_ids=[5, 6, 7], parents=[-1, 2, 1]).SerializeToString(),
        "proposal.parents[1]",
    ),
    "a node that is its own parent": (
        lambda: pb.Proposal(start_position=START, token_ids=[5], parents=[0]).SerializeToString(),
        "proposal.parents[0]",
    ),
    "fewer parents than tokens": (
        lambda: pb.Proposal(start_position=START, token_ids=[5, 6], parents=[-1]).SerializeToString(),
        "proposal.parents",
    ),
    "a token out of range": (
        lambda: pb.Proposal(start_position=START, token_ids=[5, 10**6]).SerializeToString(),
        "proposal.token_ids[1]",
    ),
    "too many nodes": (
        lambda: pb.Proposal(start_position=START, token_ids=[5] * 1000).SerializeToString(),
        "proposal.token_ids",
    ),
    "a start past the committed tokens": (
        lambda: pb.Proposal(start_position=START + 1, token_ids=[5]).SerializeToString(),
        "proposal.start_position",
    ),
    "scores for other nodes": (
        lambda: pb.Proposal(start_position=START, token_ids=[5], scores=b"\1\2").SerializeToString(),
        "proposal.scores",
    ),
    "bytes that do not parse": (lambda: b"\xff" * 20, "proposal"),
}


async def undisturbed(peer: Peer) -> list[int]:
    """The tokens of a session that no proposal reaches."""
    await peer.attach()
    await peer.send(open=open_session())
    await peer.next("verdict")
    return await peer.tokens_to_the_end()


@pytest.mark.parametrize("name", PROPOSALS)
async def test_a_bad_proposal_is_rejected_by_name_and_the_session_decodes_to_its_end(target: Peer, name: str) -> None:
    make, field = PROPOSALS[name]
    expected = await undisturbed(target)
    target.epoch = 2
    await target.send(open=open_session())
    assert (await target.next("verdict")).start_position == len(PROMPT)
    await target.send(proposal=make())
    await target.send(credit=pb.Credit(position=10**6))  # it is looked at when a step is due
    rejected = await target.next("proposal_rejected")
    assert rejected.status.code == code_pb2.INVALID_ARGUMENT
    assert named_field(rejected.status) == field
    assert rejected.expected_position == START
    assert await target.tokens_to_the_end() == expected
    assert len(expected) == MAX_TOKENS - 1


async def test_a_commit_with_a_gap_ends_the_draft_session_and_tells_the_position(draft: Peer) -> None:
    await draft.attach()
    await draft.send(open=open_session())
    assert (await draft.next("opened")).position == len(PROMPT)
    await draft.send(commit=pb.Commit(start_position=len(PROMPT) + 3, token_ids=[7]))
    error = await draft.next("error")
    assert error.status.code == code_pb2.OUT_OF_RANGE
    assert reason_of(error.status) == "COMMIT_GAP"
    assert named_field(error.status) == "commit.start_position"
    assert error.expected_position == len(PROMPT)


async def test_a_commit_that_contradicts_an_earlier_one_ends_the_draft_session(draft: Peer) -> None:
    await draft.attach()
    await draft.send(open=open_session())
    await draft.send(commit=pb.Commit(start_position=len(PROMPT), token_ids=[7, 8]))
    await draft.send(commit=pb.Commit(start_position=len(PROMPT) + 1, token_ids=[9]))
    error = await draft.next("error")
    assert error.status.code == code_pb2.FAILED_PRECONDITION
    assert reason_of(error.status) == "COMMIT_MISMATCH"
    assert error.expected_position == len(PROMPT) + 2


async def test_a_commit_of_a_token_out_of_range_names_it(draft: Peer) -> None:
    await draft.attach()
    await draft.send(open=open_session())
    await draft.send(commit=pb.Commit(start_position=len(PROMPT), token_ids=[10**6]))
    assert named_field((await draft.next("error")).status) == "commit.token_ids"


async def test_a_draft_that_ended_a_session_opens_it_again_under_a_higher_epoch(draft: Peer) -> None:
    await draft.attach()
    await draft.send(open=open_session())
    await draft.send(commit=pb.Commit(start_position=len(PROMPT) + 3, token_ids=[7]))
    await draft.next("error")
    draft.epoch = 2
    await draft.send(open=open_session())
    proposal = pb.Proposal.FromString(await draft.next("proposal"))
    assert proposal.start_position == len(PROMPT)
    assert proposal.token_ids
    await draft.send(close=pb.CloseSession(reason="finished"))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"token_ids": [10**6], "num_prompt_tokens": len(PROMPT) + 1}, "open.token_ids"),
        ({"num_prompt_tokens": 1000}, "open.num_prompt_tokens"),
        ({"sampling": pb.TokenSampling(temperature=-1.0)}, "open.sampling.temperature"),
        ({"sampling": pb.TokenSampling(top_p=float("nan"))}, "open.sampling.top_p"),
    ],
    ids=["token", "prompt", "temperature", "top_p"],
)
@pytest.mark.parametrize("role", ["target", "draft"])
async def test_a_session_that_cannot_be_opened_is_refused_by_name(
    steady_cluster: Cluster, role: str, change: dict[str, Any], field: str
) -> None:
    async with peer_of(steady_cluster, role) as peer:
        await peer.attach()
        await peer.send(open=open_session(**change))
        assert named_field((await peer.next("error")).status) == field


@pytest.mark.parametrize("role", ["target", "draft"])
async def test_no_extreme_sampling_of_a_coordinator_that_lies_ends_an_engine(
    steady_cluster: Cluster, role: str
) -> None:
    bad = [(f"open.sampling.{name}", {name: value}) for name, value, is_legal in cases() if not is_legal]
    bad += [
        ("open.sampling.logit_bias[7]", {"logit_bias": {7: bias}}) for bias, is_legal in bias_cases() if not is_legal
    ]
    bad += [
        ("open.sampling.logit_bias[9999]", {"logit_bias": {9999: 1.0}}),
        ("open.sampling.stop_token_ids", {"stop_token_ids": [5] * 1025}),
        ("open.sampling.min_tokens", {"stop_token_ids": range(259), "min_tokens": 3}),
    ]
    good = [{name: value} for name, value, is_legal in cases() if is_legal]
    good += [
        {"top_k": 2**32 - 1, "seed": 2**64 - 1, "choice": 2**32 - 1, "max_tokens": 2**32 - 1, "min_tokens": 2**32 - 1}
    ]
    kind = "verdict" if role == "target" else "proposal"
    pid = steady_cluster.services[role].pid
    async with peer_of(steady_cluster, role) as peer:
        await peer.attach()
        for field, fields in bad:
            body = open_session()
            for name, value in fields.items():
                if name == "logit_bias":
                    body.sampling.logit_bias.update(value)
                elif name == "stop_token_ids":
                    body.sampling.stop_token_ids.extend(value)
                else:
                    setattr(body.sampling, name, value)
            await peer.send(open=body)
            error = await peer.next("error")
            assert error.status.code == code_pb2.INVALID_ARGUMENT, fields
            assert named_field(error.status) == field, fields
            peer.epoch += 1
        for fields in good:
            body = open_session()
            for name, value in fields.items():
                setattr(body.sampling, name, value)
            await peer.send(open=body)
            assert await peer.next(kind), fields
            peer.epoch += 1
    assert steady_cluster.services[role].pid == pid


async def test_a_stream_that_does_not_begin_with_an_attach_is_refused(target: Peer, draft: Peer) -> None:
    for peer in (target, draft):
        await peer.send(open=open_session())
        error = await peer.refusal()
        assert isinstance(error, FailedPrecondition)
        assert error.reason == "NOT_ATTACHED"


async def test_a_message_that_does_not_parse_ends_its_stream_only(steady_cluster: Cluster, target: Peer) -> None:
    async with grpc.aio.insecure_channel(steady_cluster.services["target"].spec.address) as channel:
        other = Peer(channel, WIRES["target"], "other")
        other.call = channel.stream_stream("/specdec.v1.TargetService/Verify")()
        await other.call.write(b"\xff" * 20)
        error = await other.refusal()
    assert isinstance(error, InvalidRequest)
    assert error.reason == "MALFORMED_MESSAGE"
    assert len(await undisturbed(target)) == MAX_TOKENS - 1
