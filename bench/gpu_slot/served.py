"""Steps that run services on the device: greedy tokens beside transformers', and the end of a target under streams."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.gpu_slot.place import WRONG, Found, Place
from bench.prompts import held_out_prompts
from specdec.client import Client
from specdec.commands.measuring.requests import Run, Sampling, make_request, run_requests
from specdec.commands.up.cluster import Cluster
from specdec.commands.up.plan import LocalPlan, plan_services, shipped_model

_POLL_S = 0.02


@contextlib.contextmanager
def _cluster(place: Place, num_targets: int, **target: Any) -> Iterator[Cluster]:
    """The shipped pair without MPS, where a killed client may end the others."""
    memory = {"kv_cache_memory_bytes": place.sized(2 << 30, 1 << 28)}
    plan = LocalPlan(
        target_model=shipped_model("target"), draft_model=shipped_model("draft"), device=place.sized("cuda", "cpu"),
        num_targets=num_targets, free_ports=True, target_settings={**memory, **target}, draft_settings=memory,
    )  # fmt: skip
    with Cluster(plan_services(plan)) as cluster:
        cluster.start(lambda what: print(f"waiting for {what}", flush=True))
        yield cluster


def greedy(place: Place) -> Found:
    """Greedy answers in float32, with speculation, that are not transformers' on the CPU, by ``specdec audit``."""
    asked = [f"--max-tokens={place.sized(256, 16)}", f"--num-prompts={place.sized(4, 1)}", "--samples=0"]
    with _cluster(place, 1, dtype="float32") as cluster:
        command = [sys.executable, "-m", "specdec.commands.main", "audit", *asked, "--address", cluster.address]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, flush=True)
    return {"verdict": done.stdout.splitlines()[-12:], f"{WRONG}exit code": done.returncode}


def failover(place: Place) -> Found:
    """Streams whose tokens change when one of two `deterministic` targets on a GPU is killed."""
    num_streams, num_tokens = place.sized((30, 800), (6, 200))
    prompts = held_out_prompts(Path(shipped_model("target")), 8)
    sampling = [Sampling(temperature=temperature, max_tokens=num_tokens) for temperature in (0.0, 1.0)]
    requests = [make_request(prompts[i % 8], sampling[i % 2], i, speculate=True) for i in range(num_streams)]

    async def disturbed(cluster: Cluster) -> tuple[Run, Run, int]:
        undisturbed = await run_requests(cluster.address, requests)
        killed, num_there = cluster.services["target-1"], 0
        async with Client(cluster.address) as client:
            streams = asyncio.ensure_future(run_requests(cluster.address, requests))
            while num_there < num_streams // 3 and not streams.done():  # replicas report a few times a second
                replicas = (await client.status()).replicas
                num_there = sum(each.load.num_sessions for each in replicas if each.address == killed.spec.address)
                await asyncio.sleep(_POLL_S)
            killed.kill()
            return undisturbed, await streams, num_there

    with _cluster(place, 2, deterministic=True) as cluster:
        before, after, num_there = asyncio.run(disturbed(cluster))
    pairs = zip(before.completions, after.completions, strict=True)
    same = sum(a.choices[0].token_ids == b.choices[0].token_ids for a, b in pairs)
    found: Found = {"streams": num_streams, "streams on the killed target": num_there, "equal streams": same}
    return found | {f"{WRONG}streams that differ": num_streams - same, f"{WRONG}none was disturbed": int(not num_there)}
