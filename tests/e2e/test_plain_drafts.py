"""Draft services without a model: no torch, the target's output whatever they propose, and streams outlive them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from specdec.client import Client, Completion
from specdec.commands.up.cluster import Cluster
from specdec.commands.up.plan import LocalPlan, plan_services
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from tests.support.servers.hostile_api import HEAD, fixed_api
from tests.support.services.clusters import TIMEOUTS, MakeCluster
from tests.support.services.faults import speculated
from tests.support.services.gateways import gateway
from tests.support.services.model_pair import ModelPair

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PROMPT = "def fibonacci(n):\n    if n < 2:\n        return n\n"
HOLD_OFF_MS = 30
NOT_THERE = ("torch", "transformers", "numpy", "llguidance", "safetensors", "accelerate")


def request(temperature: float = 0.0, max_tokens: int = 96, *, speculate: bool = True) -> api.GenerateRequest:
    made = api.GenerateRequest(prompt=PROMPT)
    made.sampling.temperature, made.sampling.seed, made.sampling.max_tokens = temperature, 7, max_tokens
    made.sampling.ignore_eos = True
    made.speculation.enabled = speculate
    return made


async def ask(cluster: Cluster, asked: api.GenerateRequest) -> Completion:
    async with Client(cluster.address) as client:
        return await client.complete(asked)


async def both(cluster: Cluster, temperature: float) -> Completion:
    """The answer with drafts, which is that of plain decoding."""
    plain = await ask(cluster, request(temperature, speculate=False))
    drafted = await ask(cluster, request(temperature))
    assert drafted.identity == plain.identity
    return drafted


@contextmanager
def without_libraries(pair: ModelPair, folder: Path, drafters: str) -> Iterator[Cluster]:
    """A cluster whose draft finds none of the libraries that models need."""
    blocked = folder / "blocked"
    blocked.mkdir(parents=True)
    for name in NOT_THERE:
        (blocked / f"{name}.py").write_text(f"raise ImportError({name!r})\n")
    path = os.pathsep.join([str(blocked), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = LocalPlan(
        target_model=str(pair.target), draft_model="", device="cpu", free_ports=True,
        target_settings={"hold_off_ms": HOLD_OFF_MS, "adaptive_speculation": False},
        draft_settings={"drafters": drafters},
    )  # fmt: skip
    specs = [
        replace(spec, environment={**spec.environment, "PYTHONPATH": path, "NO_FORK": "1"})
        if spec.role == "draft"
        else spec
        for spec in plan_services(settings, environment={})
    ]
    with Cluster(specs, log_dir=folder, timeouts=TIMEOUTS) as cluster:
        cluster.start()
        yield cluster


def drafters_of(completion: Completion) -> set[str]:
    """Who the accepted tokens say proposed them."""
    tokens = (token for choice in completion.choices.values() for token in choice.tokens)
    return {token.drafter for token in tokens if token.origin == pb.ORIGIN_DRAFT}


async def test_a_draft_without_torch_looks_things_up(shipped_pair: ModelPair, tmp_path: Path) -> None:
    with without_libraries(shipped_pair, tmp_path, "ngram,suffix") as cluster:
        await both(cluster, 0.7)
        greedy = await both(cluster, 0.0)
        assert greedy.require_finished().stats.num_accepted > 0
        assert drafters_of(greedy) <= {"ngram", "suffix"}
        async with Client(cluster.address) as client:
            (draft,) = [each for each in (await client.status()).replicas if each.role == "draft"]
        assert (draft.identity.name, draft.state) == ("ngram+suffix", "ready")


async def test_what_an_endpoint_says_is_verified_like_any_draft(
    shipped_cluster: Cluster, shipped_pair: ModelPair, tmp_path: Path
) -> None:
    async with gateway(shipped_cluster.address) as endpoint:
        options = {"base_url": f"{endpoint.url}/v1", "model": "target", "max_tokens": 64}
        drafters = json.dumps([{"method": "openai_api", **options}])
        with without_libraries(shipped_pair, tmp_path, drafters) as cluster:
            plain = await both(cluster, 0.0)
            async with Client(cluster.address) as client:  # the endpoint computes as much as the target, on these cores
                greedy = await speculated(client, request())
            assert greedy.identity == plain.identity
            assert drafters_of(greedy) == {"openai_api"}
            await both(cluster, 0.7)


@pytest.mark.parametrize(
    ("name", "answer", "repeats"),
    [
        ("silence", b"", b""),
        pytest.param("garbage", b"\x00" * 4096, b"", marks=pytest.mark.long),
        pytest.param("a huge line", HEAD + b"data: ", b"x" * 65536, marks=pytest.mark.long),
    ],
)
async def test_streams_go_on_without_a_hostile_endpoint(
    make_cluster: MakeCluster, name: str, answer: bytes, repeats: bytes
) -> None:
    with fixed_api(answer, repeats=repeats, stays=name == "silence") as hostile:
        drafters = json.dumps([{"method": "openai_api", "base_url": hostile.url, "model": "m", "timeout_s": 1}])
        cluster = make_cluster(draft_settings={"drafters": drafters})
        await both(cluster, 0.0)
        await both(cluster, 0.7)
        cluster.check_running()
        assert hostile.requests
        assert len(hostile.requests) < 30
