"""What /metrics of the three services shows after traffic."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from specdec.client import Client
from specdec.commands.up.cluster import Cluster
from specdec.wire.errors import InvalidRequest
from tests.support.services.faults import Reading, eventually, make_request, plain, scrape

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

ENGINE = [
    "steps_total",
    "step_seconds_count",
    "step_tokens_count",
    "step_sequences_count",
    "sessions_opened_total",
    "loop_seconds_count",
    "rollback_tokens_count",
    "info",
    "kv_blocks",
    "kv_blocks_cached",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "rollbacks_total",
    "messages_total",
    "message_bytes_total",
    "open_streams",
]
NONZERO = {
    "coordinator": [
        "requests_total{outcome=OK}",
        "requests_total{outcome=INVALID_ARGUMENT}",
        "requests_total{outcome=CANCELLED}",
        "queue_seconds_count",
        "prompt_tokens_total",
        "cached_tokens_total",
        "tokens_total{origin=prefill}",
        "tokens_total{origin=draft}",
        "tokens_total{origin=recovered}",
        "tokens_total{origin=decode}",
        "time_to_first_token_seconds_count",
        "inter_token_seconds_count",
        "request_seconds_count",
        "outside_seconds_count",
        "proposed_tokens_total{depth=1}",
        "accepted_tokens_total{depth=1}",
        "steps_total{kind=verify}",
        "steps_total{kind=plain}",
        "steps_total{kind=prefill}",
        "hits_total",
        "wasted_tokens_total",
        "draft_latency_seconds_count",
        "verify_latency_seconds_count",
        "replicas{role=target,state=ready}",
        "replicas{role=draft,state=ready}",
    ],
    "target": [
        *ENGINE,
        "steps_total{kind=verify}",
        "steps_total{kind=plain}",
        "steps_total{kind=prefill}",
        "tokens_total{origin=draft}",
        "proposed_tokens_total{depth=1}",
        "accepted_tokens_total{depth=1}",
        "verified_nodes_total",
        "wasted_tokens_total",
        "hits_total",
        "misses_total",
        "committed_tokens_count",
        "hold_off_seconds_count",
        "verify_seconds_count",
        "time_to_first_token_seconds_count",
        "inter_token_seconds_count",
        "requests_total{outcome=length}",
        "requests_total{outcome=abort}",
        "decode_seconds_total",
        "plain_equivalent_seconds_total",
        "draft_credit",
    ],
    "draft": [
        *ENGINE,
        "proposals_total",
        "drafted_tokens_total",
        "proposal_tokens_count",
        "committed_tokens_total{found=found}",
        "committed_tokens_total{found=missing}",
        "draft_seconds_count",
        "requests_total{outcome=closed}",
        "tokens_total{kind=main}",
    ],
}
PRESENT = {
    "coordinator": ["queue_length", "requests_running", "token_mismatches_total", "journal_seconds_count"],
    "target": ["preemptions_total", "stale_proposals_total", "kv_blocks_used", "queue_length", "sessions"],
    "draft": ["preemptions_total", "token_mismatches_total", "kv_blocks_used", "queue_length", "sessions"],
}


@pytest.mark.parametrize("role", ["coordinator", "target", "draft"])
async def test_metrics_tell_of_traffic(steady_cluster: Cluster, metrics_ports: dict[str, int], role: str) -> None:
    names = {f"specdec_{role}_{name}" for name in NONZERO[role]}
    zero = names

    async def all_are_above_zero() -> bool:
        nonlocal zero
        await traffic(steady_cluster)
        samples = scrape(metrics_ports[role])
        zero = {name for name in names if samples.get(name, 0.0) <= 0}
        return not zero

    with contextlib.suppress(AssertionError):
        await eventually(all_are_above_zero, "all metrics are above zero")
    assert zero == set()
    samples = scrape(metrics_ports[role])
    assert samples["specdec_build_info"] == 1
    assert {name for name in PRESENT[role] if f"specdec_{role}_{name}" not in samples} == set()
    assert samples[f"specdec_{role}_token_mismatches_total"] == 0


async def traffic(cluster: Cluster) -> None:
    """Requests of every kind: speculating, plain, from the prefix cache, refused, cancelled."""
    body = make_request(temperature=1.0, prompt="a prompt that fills some blocks of the cache " * 3)
    async with Client(cluster.address) as client:
        await asyncio.gather(*(client.complete(request) for request in (body, plain(body))))
        await client.complete(body)
        with pytest.raises(InvalidRequest):
            await client.complete(make_request(temperature=-1.0))
        async with Reading(client, make_request(max_tokens=1000)) as stream:
            await stream.until(5)


async def test_tokens_by_origin_add_up_to_what_clients_got(
    steady_cluster: Cluster, metrics_ports: dict[str, int]
) -> None:
    def total() -> float:
        return scrape(metrics_ports["coordinator"])["specdec_coordinator_tokens_total"]

    async with Client(steady_cluster.address) as client:

        async def is_idle() -> bool:
            return (await client.status()).num_running == 0

        await eventually(is_idle, "streams of other tests have ended")
        before = total()
        completion = await client.complete(make_request(temperature=1.0, n=3))
    assert total() - before == completion.num_tokens
