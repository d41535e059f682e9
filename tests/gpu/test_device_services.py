"""Services on a CUDA device: greedy tokens beside transformers', and the end of a target under streams.

`make gpu-slot` runs these as steps of a slot; a dry slot runs them small on the CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.prompts import held_out_prompts
from specdec.client import Client
from specdec.commands.measuring.requests import Run, Sampling, make_request, run_requests
from specdec.commands.up.cluster import Cluster
from specdec.commands.up.plan import LocalPlan, plan_services, shipped_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

IS_PLAYED = torch.cuda.is_available() and torch.cuda.get_device_name() == "NVIDIA Fake"


@contextlib.contextmanager
def cluster_of(num_targets: int, **target: Any) -> Iterator[Cluster]:
    """The shipped pair without MPS, where a killed client may end the others."""
    memory = {"kv_cache_memory_bytes": 1 << 28 if IS_PLAYED else 2 << 30}
    plan = LocalPlan(
        target_model=shipped_model("target"), draft_model=shipped_model("draft"), device="cpu" if IS_PLAYED else "cuda",
        num_targets=num_targets, free_ports=True, target_settings={**memory, **target}, draft_settings=memory,
    )  # fmt: skip
    with Cluster(plan_services(plan)) as cluster:
        cluster.start()
        yield cluster


def test_greedy_tokens_with_speculation_are_those_of_transformers_on_the_cpu() -> None:
    asked = ["--max-tokens=16", "--num-prompts=1"] if IS_PLAYED else ["--max-tokens=256", "--num-prompts=4"]
    with cluster_of(1, dtype="float32") as cluster:
        audit = [sys.executable, "-m", "specdec.commands.main", "audit", *asked, "--samples=0"]
        subprocess.run([*audit, "--address", cluster.address], check=True)


def test_streams_keep_their_tokens_when_one_of_two_targets_on_a_gpu_is_killed(
    record_property: Callable[[str, object], None],
) -> None:
    num_streams, num_tokens = (6, 200) if IS_PLAYED else (30, 800)
    prompts = held_out_prompts(Path(shipped_model("target")), num_streams)
    sampling = [Sampling(temperature=temperature, max_tokens=num_tokens) for temperature in (0.0, 1.0)]
    requests = [make_request(prompt, sampling[i % 2], i, speculate=True) for i, prompt in enumerate(prompts)]

    async def disturbed(cluster: Cluster) -> Run:
        killed, num_there = cluster.services["target-1"], 0
        async with Client(cluster.address) as client:
            streams = asyncio.ensure_future(run_requests(cluster.address, requests))
            while num_there < num_streams // 3 and not streams.done():  # replicas report a few times a second
                replicas = (await client.status()).replicas
                num_there = sum(each.load.num_sessions for each in replicas if each.address == killed.spec.address)
                await asyncio.sleep(0.02)
            killed.kill()
            record_property("streams on the killed target", num_there)
            assert num_there
            return await streams

    with cluster_of(2, deterministic=True) as cluster:
        before = asyncio.run(run_requests(cluster.address, requests)).token_ids
        after = asyncio.run(disturbed(cluster)).token_ids
    record_property("equal streams", sum(a == b for a, b in zip(before, after, strict=True)))
    assert before == after
