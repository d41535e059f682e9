"""Drafts that are not there, do not fit, or reach less far than the target: requests are served all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.client import Client
from specdec.commands.up.cluster import HOST, Cluster, free_port
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from tests.support.services.faults import addresses_of, another, eventually, make_request, plain
from tests.support.services.model_pair import ModelPair, with_another_tokenizer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

DRAFT_CONTEXT = 128


async def draft_in_state(client: Client, *states: str) -> api.ReplicaStatus:
    """The draft's status, once it is in one of these states."""
    found: list[api.ReplicaStatus] = []

    async def is_there() -> bool:
        replicas = (await client.status()).replicas
        found[:] = [r for r in replicas if r.role == "draft" and r.state in states]
        return bool(found)

    await eventually(is_there, f"the draft is {' or '.join(states)}")
    return found[0]


async def test_a_draft_that_nobody_runs_is_reported_and_requests_are_decoded_plainly(
    steady_cluster: Cluster, tmp_path: Path
) -> None:
    body = make_request(temperature=1.0)
    settings = {**addresses_of(steady_cluster), "drafts": [f"{HOST}:{free_port()}"]}
    with another("coordinator", tmp_path, **settings) as alone:
        async with Client(alone.address) as client, Client(steady_cluster.address) as usual:
            completion = await client.complete(body)
            assert completion.identity == (await usual.complete(body)).identity
            assert completion.require_finished().stats.num_verify_steps == 0
            assert (await draft_in_state(client, "down")).detail
            assert not (await client.model_info()).HasField("draft")


async def test_a_draft_with_another_tokenizer_is_incompatible_and_requests_are_served(
    steady_cluster: Cluster, tiny_pair: ModelPair, tmp_path: Path
) -> None:
    body = make_request(temperature=1.0)
    model = with_another_tokenizer(tiny_pair.draft, tmp_path / "model")
    with another("draft", tmp_path / "draft", model=model, model_name="stranger") as draft:
        settings = {**addresses_of(steady_cluster), "drafts": addresses_of(draft)["drafts"]}
        with another("coordinator", tmp_path / "coordinator", **settings) as coordinator:
            async with Client(coordinator.address) as client, Client(steady_cluster.address) as usual:
                status = await draft_in_state(client, "incompatible")
                assert "the tokenizer of draft stranger" in status.detail
                completion = await client.complete(body)
                assert completion.identity == (await usual.complete(body)).identity
                assert completion.require_finished().stats.num_verify_steps == 0
                assert not (await client.model_info()).HasField("draft")


async def test_a_draft_with_a_shorter_context_is_noticed_and_used_as_far_as_it_reaches(
    steady_cluster: Cluster, tiny_pair: ModelPair, tmp_path: Path
) -> None:
    with another("draft", tmp_path / "draft", model=tiny_pair.draft, max_model_len=DRAFT_CONTEXT) as draft:
        settings = {**addresses_of(steady_cluster), "drafts": addresses_of(draft)["drafts"]}
        with another("coordinator", tmp_path / "coordinator", **settings) as coordinator:
            async with Client(coordinator.address) as client:
                await draft_in_state(client, "ready")
                body = make_request(temperature=1.0, max_tokens=300)
                without = await client.complete(plain(body))
                assert without.started is not None
                [notice] = without.started.notices
                assert f"context of {DRAFT_CONTEXT} tokens, the target of 4096" in notice
                reach = DRAFT_CONTEXT - without.started.num_prompt_tokens

                async def is_used() -> bool:
                    completion = await client.complete(body)
                    assert completion.identity == without.identity
                    origins = [token.origin for token in completion.choices[0].tokens]
                    assert pb.ORIGIN_DRAFT not in origins[reach + 1 :]
                    return pb.ORIGIN_DRAFT in origins[:reach]

                await eventually(is_used, "the draft is used as far as it reaches")
                # A prompt that is longer than the draft's context never reaches it.
                beyond = await client.complete(make_request(max_tokens=20, prompt="x" * 200))
                assert beyond.require_finished().stats.num_verify_steps == 0
