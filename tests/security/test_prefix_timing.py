"""Whether one tenant can tell by time what another one has asked: measured, with and without the salt of tenants.

Long prompts are asked for in random order: some that another tenant has just asked for, some that nobody has. The times
to the first token of both are compared by a rank test. That test sees a shared cache: with one tenant for all, which is
what there would be without the salt, the same comparison must tell the two apart, or it proves nothing.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator

import grpc
import pytest
import typer
from scipy.stats import mannwhitneyu

from specdec.commands.up.cluster import Cluster
from specdec.coordinator.intake.callers import TENANT_KEY
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import coordinator_pb2_grpc as api_grpc
from tests.support.services.clusters import MakeCluster

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

NUM_PAIRS = 60
NUM_PROMPT_TOKENS = 900
FALSE_ALARM_RATE = 0.001
"""Of the test that there is no difference, where there is none; and the least that the other one must reach."""
SEED = 20261122


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> Cluster:
    return make_cluster()


def prompts(rng: random.Random, vocab_size: int) -> Iterator[list[int]]:
    """Prompts that have no block in common."""
    while True:
        yield [rng.randrange(10, vocab_size) for _ in range(NUM_PROMPT_TOKENS)]


def first_token_s(stub: api_grpc.CoordinatorServiceStub, token_ids: list[int], tenant: str) -> float:
    """How long the first token of a prompt takes."""
    body = api.GenerateRequest(prompt_token_ids=api.TokenIds(token_ids=token_ids))
    body.sampling.max_tokens, body.sampling.seed = 1, 1
    began_s = time.perf_counter()
    for chunk in stub.Generate(body, metadata=((TENANT_KEY, tenant),)):
        if chunk.HasField("delta"):
            return time.perf_counter() - began_s
    raise AssertionError("no token")


def measure(stub: api_grpc.CoordinatorServiceStub, vocab_size: int, prober: str) -> tuple[list[float], list[float]]:
    """Times to the first token of prompts that `victim` has asked for, and of prompts that nobody has."""
    rng = random.Random(f"{SEED}/{prober}")
    made = prompts(rng, vocab_size)
    asked, unasked = [], []
    for _ in range(NUM_PAIRS):
        known, unknown = next(made), next(made)
        first_token_s(stub, known, "victim")
        for token_ids in rng.sample([known, unknown], 2):
            (asked if token_ids is known else unasked).append(first_token_s(stub, token_ids, prober))
    return asked, unasked


def test_a_tenant_cannot_tell_by_time_what_another_has_asked(cluster: Cluster) -> None:
    with grpc.insecure_channel(cluster.address) as channel:
        stub = api_grpc.CoordinatorServiceStub(channel)
        vocab_size = stub.GetModelInfo(api.GetModelInfoRequest()).target.vocab_size
        p_values = {}
        for prober, what in (("victim", "without the salt"), ("prober", "with the salt of tenants")):
            asked, unasked = measure(stub, vocab_size, prober)
            p_values[prober] = float(mannwhitneyu(asked, unasked).pvalue)
            typer.echo(
                f"{what}: {NUM_PAIRS} pairs, median {statistics.median(asked) * 1e3:.1f} ms asked before, "
                f"{statistics.median(unasked) * 1e3:.1f} ms not, p = {p_values[prober]:.2g}"
            )
    assert p_values["victim"] < FALSE_ALARM_RATE
    assert p_values["prober"] >= FALSE_ALARM_RATE
